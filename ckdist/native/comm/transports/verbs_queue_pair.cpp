#include "comm/transports/verbs_queue_pair.h"

#if CKDIST_HAVE_VERBS
#include <endian.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace ckdist {

namespace {
constexpr uint32_t kInline = 220;  // tried first; smaller values follow
constexpr uint32_t kSequenceMask = 0xffffff;
}  // namespace

VerbsQueuePair::VerbsQueuePair(VerbsDevice& device, uint32_t peer, int depth, int receives)
    : verbs_(verbs_library()), device_(device), peer_(peer), depth_(depth) {
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = device.queue();
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = uint32_t(depth);
  wanted.cap.max_recv_wr = uint32_t(receives);
  wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
  pair_ = nullptr;
  for (uint32_t bytes = kInline; !pair_; bytes /= 2) {
    wanted.cap.max_inline_data = bytes;
    pair_ = verbs_.create_qp(device.domain(), &wanted);
    if (!pair_ && bytes == 0)
      fail(Status::capacity, "RDMA device %s has no queue pair for rank %u: %s", device.name.c_str(), peer,
           std::strerror(errno));
    inline_ = bytes;
  }
  try {
    if (getrandom(&sequence_, sizeof sequence_, 0) != sizeof sequence_)
      fail(Status::native, "no random numbers: %s", std::strerror(errno));
    sequence_ &= kSequenceMask;
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_INIT;
    attributes.port_num = uint8_t(device.port);
    attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    modify(attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "be initialised");
  } catch (...) {
    verbs_.destroy_qp(pair_);
    throw;
  }
}

VerbsQueuePair::~VerbsQueuePair() { verbs_.destroy_qp(pair_); }

void VerbsQueuePair::modify(ibv_qp_attr& attributes, int mask, const char* state) {
  const int reason = verbs_.modify_qp(pair_, &attributes, mask);
  if (reason)
    fail(Status::comm, "the connection to rank %d over %s cannot %s: %s", int(peer_), device_.name.c_str(), state,
         std::strerror(reason));
}

void VerbsQueuePair::connect(const VerbsHost& host, const VerbsPair& pair, int ack_exponent) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = std::min(device_.port_attributes.active_mtu, ibv_mtu(host.mtu));
  attributes.dest_qp_num = pair.queue_pair;
  attributes.rq_psn = pair.sequence & kSequenceMask;
  attributes.max_dest_rd_atomic = uint8_t(std::min(device_.attributes.max_qp_rd_atom, 16));
  attributes.min_rnr_timer = 12;
  attributes.ah_attr.port_num = uint8_t(device_.port);
  if (device_.ethernet()) {
    attributes.ah_attr.is_global = 1;
    std::memcpy(&attributes.ah_attr.grh.dgid, host.gid, sizeof host.gid);
    attributes.ah_attr.grh.sgid_index = uint8_t(device_.gid_index);
    attributes.ah_attr.grh.hop_limit = 64;
  } else {
    attributes.ah_attr.dlid = host.lid;
  }
  modify(attributes,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
             IBV_QP_MIN_RNR_TIMER,
         "be set to receive");

  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = sequence_;
  attributes.timeout = uint8_t(ack_exponent);
  attributes.retry_cnt = attributes.rnr_retry =
      6;  // 7 means forever: of rnr_retry on all devices, of retry_cnt on soft-RoCE
  attributes.max_rd_atomic =
      uint8_t(std::min<uint32_t>({uint32_t(device_.attributes.max_qp_init_rd_atom), host.reads, 16}));
  modify(attributes,
         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
         "be set to send");
}

void VerbsQueuePair::stop() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  verbs_.modify_qp(pair_, &attributes, IBV_QP_STATE);
}

void VerbsQueuePair::post_receive() {
  ibv_recv_wr request{}, *bad;
  request.wr_id = peer_ << 48;
  const int reason = ibv_post_recv(pair_, &request, &bad);
  if (reason) fail(Status::comm, "no receive for rank %d can be posted: %s", int(peer_), std::strerror(reason));
}

uint64_t VerbsQueuePair::post(ibv_send_wr& request, const void* data, uint32_t bytes, uint32_t key, VerbsRemote at,
                              bool signal) {
  ibv_sge part{uint64_t(data), bytes, key};
  request.sg_list = &part;
  request.num_sge = bytes ? 1 : 0;
  request.wr.rdma.remote_addr = at.address;
  request.wr.rdma.rkey = at.key;
  const uint64_t number = posted_ + 1;
  request.wr_id = peer_ << 48 | number;
  if (signal || number - signalled_ >= uint64_t(depth_) / 4) {
    request.send_flags |= IBV_SEND_SIGNALED;
    signalled_ = number;
  }
  ibv_send_wr* bad;
  const int reason = ibv_post_send(pair_, &request, &bad);
  if (reason)
    fail(Status::comm, "rank %d cannot be written to over %s: %s", int(peer_), device_.name.c_str(),
         std::strerror(reason));
  return posted_ = number;
}

uint64_t VerbsQueuePair::write(const void* data, uint32_t bytes, uint32_t key, VerbsRemote to, bool signal) {
  ibv_send_wr request{};
  request.opcode = IBV_WR_RDMA_WRITE;
  if (bytes <= inline_) request.send_flags = IBV_SEND_INLINE;
  return post(request, data, bytes, key, to, signal);
}

uint64_t VerbsQueuePair::write_frame(const void* data, uint32_t bytes, uint32_t key, VerbsRemote to, uint32_t slot) {
  ibv_send_wr request{};
  request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  request.imm_data = htobe32(slot);
  if (bytes <= inline_) request.send_flags = IBV_SEND_INLINE;
  return post(request, data, bytes, key, to, false);
}

uint64_t VerbsQueuePair::read(void* data, uint32_t bytes, uint32_t key, VerbsRemote from) {
  ibv_send_wr request{};
  request.opcode = IBV_WR_RDMA_READ;
  return post(request, data, bytes, key, from, true);
}

}  // namespace ckdist
#endif
