#include "copy_engines/dsa_engine.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "core/error.h"
#include "core/futex.h"

#if __has_include(<linux/idxd.h>)
#include <linux/idxd.h>
namespace {
static_assert(sizeof(dsa_hw_desc) == sizeof(ckdist::DsaDescriptor) &&
              sizeof(dsa_completion_record) == sizeof(ckdist::DsaRecord));
static_assert(offsetof(dsa_hw_desc, completion_addr) == offsetof(ckdist::DsaDescriptor, record));
static_assert(offsetof(dsa_hw_desc, src_addr) == offsetof(ckdist::DsaDescriptor, source));
static_assert(offsetof(dsa_hw_desc, desc_list_addr) == offsetof(ckdist::DsaDescriptor, source));
static_assert(offsetof(dsa_hw_desc, dst_addr) == offsetof(ckdist::DsaDescriptor, destination));
static_assert(offsetof(dsa_hw_desc, xfer_size) == offsetof(ckdist::DsaDescriptor, size));
static_assert(offsetof(dsa_hw_desc, desc_count) == offsetof(ckdist::DsaDescriptor, size));
static_assert(offsetof(dsa_completion_record, status) == offsetof(ckdist::DsaRecord, status));
static_assert(offsetof(dsa_completion_record, result) == offsetof(ckdist::DsaRecord, result));
static_assert(offsetof(dsa_completion_record, bytes_completed) == offsetof(ckdist::DsaRecord, completed));
static_assert(offsetof(dsa_completion_record, fault_addr) == offsetof(ckdist::DsaRecord, fault_address));
static_assert(DSA_OPCODE_BATCH == static_cast<int>(ckdist::DsaOperation::batch) &&
              DSA_OPCODE_MEMMOVE == static_cast<int>(ckdist::DsaOperation::memory_move));
static_assert(IDXD_OP_FLAG_BOF == ckdist::kDsaBlockOnFault && IDXD_OP_FLAG_CRAV == ckdist::kDsaRecordAddress &&
              IDXD_OP_FLAG_RCR == ckdist::kDsaRequestRecord);
static_assert(DSA_COMP_SUCCESS == static_cast<int>(ckdist::DsaStatus::success) &&
              DSA_COMP_PAGE_FAULT_NOBOF == static_cast<int>(ckdist::DsaStatus::page_fault));
static_assert(DSA_COMP_BATCH_FAIL == static_cast<int>(ckdist::DsaStatus::batch_failed));
static_assert(DSA_COMP_BATCH_PAGE_FAULT == static_cast<int>(ckdist::DsaStatus::batch_page_fault));
}  // namespace
#endif

namespace ckdist {
namespace {

constexpr int kSubmitTries = 256;           // with a pause each: some ten microseconds
constexpr int64_t kLargestPiece = 1 << 30;  // far below the limit of 32 bits
constexpr uintptr_t kPage = 4096;

uint64_t address_of(const void* p) { return reinterpret_cast<uint64_t>(p); }

uint8_t status_of(const DsaRecord& record) { return __atomic_load_n(&record.status, __ATOMIC_ACQUIRE); }

bool is(uint8_t status, DsaStatus kind) { return (status & kDsaStatusMask) == static_cast<uint8_t>(kind); }

// Touches every page of a range with a write that keeps its content.
void touch_pages(uint8_t* begin, int64_t bytes) {
  for (uint8_t* p = begin; p < begin + bytes;
       p = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) | (kPage - 1)) + 1))
    __atomic_fetch_or(p, uint8_t{0}, __ATOMIC_RELAXED);
}
void read_pages(const uint8_t* begin, int64_t bytes) {
  for (const uint8_t* p = begin; p < begin + bytes;
       p = reinterpret_cast<const uint8_t*>((reinterpret_cast<uintptr_t>(p) | (kPage - 1)) + 1))
    static_cast<void>(*static_cast<const volatile uint8_t*>(p));
}

// True if a faulting address lies in a range. The device may have cleared the lower 12 bits of the address.
bool lies_in(uint64_t address, const void* begin, int64_t bytes) {
  const uint64_t first = address_of(begin) & ~uint64_t(kPage - 1),
                 last = (address_of(begin) + static_cast<uint64_t>(bytes) - 1) | (kPage - 1);
  return address >= first && address <= last;
}

}  // namespace

DsaEngine::DsaEngine(std::unique_ptr<DsaPortal> portal, const DsaQueueLimits& limits, int64_t copy_ns, int64_t close_ns)
    : portal_(std::move(portal)),
      limits_(limits),
      copy_ns_(copy_ns),
      close_ns_(close_ns),
      name_("DSA " + limits.name + (limits.credits ? " (dedicated)" : " (shared)")),
      stream_(widest_stream().copy),
      memory_(new DeviceMemory()) {}

DsaEngine::~DsaEngine() {
  try {
    const auto under_way = [](const Job& job) { return job.waiting > 0; };
    // poll() completes all jobs when the first deadline has passed.
    while (!stuck_ && std::any_of(jobs_, jobs_ + kJobs, under_way)) {
      for (Job& job : jobs_)
        if (job.waiting) poll(job);
      cpu_pause();
    }
    if (!closed_ && !stuck_) stuck_ = !portal_->close(close_ns_);
  } catch (const Error&) {  // the device is stuck
  }
  if (stuck_) {  // the device may still write: its memory is leaked
    static_cast<void>(memory_.release());
    static_cast<void>(portal_.release());
  }
}

int64_t DsaEngine::submit(const Copy* copies, int count) {
  Job& job = jobs_[(tickets_ + 1) % kJobs];
  if (!given_up_ && job.waiting) poll(job);  // the oldest ticket
  if (given_up_ || job.waiting) {
    for (int i = 0; i < count; ++i) copy_here(copies[i].to, copies[i].from, copies[i].bytes);
    return 0;
  }
  if (!split(copies, count, job)) return 0;
  job.ticket = ++tickets_;
  begin(job);
  return job.waiting ? job.ticket : 0;
}

bool DsaEngine::done(int64_t ticket) {
  if (stuck_) fail(Status::native, "%s", trouble_.c_str());
  if (ticket <= 0) return true;
  Job& job = jobs_[ticket % kJobs];
  if (job.ticket != ticket) return true;  // another ticket has taken its place
  if (job.waiting) poll(job);
  return job.waiting == 0;
}

// Divides the copies into pieces that the queue accepts. Copies that exceed a job's pieces are made here. Returns the
// number of pieces.
int64_t DsaEngine::split(const Copy* copies, int count, Job& job) {
  const int64_t most = std::max<int64_t>(1, std::min(limits_.max_transfer, kLargestPiece));
  job.pieces = job.waiting = 0;
  job.batched = false;
  for (int i = 0; i < count; ++i) {
    uint8_t* to = copies[i].to;
    const uint8_t* from = copies[i].from;
    int64_t left = copies[i].bytes;
    for (; left > 0 && job.pieces < kPieces; ++job.pieces) {
      const int64_t bytes = std::min(left, most);
      job.piece[job.pieces] = {to, from, static_cast<uint32_t>(bytes), 0, true};
      to += bytes;
      from += bytes;
      left -= bytes;
    }
    copy_here(to, from, left);
  }
  job.waiting = job.pieces;
  return job.pieces;
}

void DsaEngine::begin(Job& job) {
  job.deadline = now_ns() + copy_ns_;
  if (job.pieces < 2 || job.pieces > limits_.max_batch) {
    for (int i = 0; i < job.pieces; ++i)
      if (!begin_piece(job, i)) finish_here(job, i);
    return;
  }
  const int j = index_of(job);
  for (int i = 0; i < job.pieces; ++i) describe(job, i);
  DsaRecord& record = memory_->batch_records[j];
  record = {};
  DsaDescriptor& batch = memory_->batches[j];
  batch = {};
  batch.operation = static_cast<uint32_t>(DsaOperation::batch) << 24 | kDsaRecordAddress | kDsaRequestRecord;
  batch.record = address_of(&record);
  batch.source = address_of(memory_->descriptors[j]);
  batch.size = static_cast<uint32_t>(job.pieces);
  job.batched = hand_over(batch);
  for (int i = 0; !job.batched && i < job.pieces; ++i) finish_here(job, i);
}

void DsaEngine::describe(Job& job, int index) {
  const int j = index_of(job);
  const Piece& piece = job.piece[index];
  DsaRecord& record = memory_->records[j][index];
  record = {};
  DsaDescriptor& move = memory_->descriptors[j][index];
  move = {};
  move.operation = static_cast<uint32_t>(DsaOperation::memory_move) << 24 | kDsaRecordAddress | kDsaRequestRecord |
                   (limits_.block_on_fault ? kDsaBlockOnFault : 0u);
  move.record = address_of(&record);
  move.source = address_of(piece.from);
  move.destination = address_of(piece.to);
  move.size = piece.bytes;
}

bool DsaEngine::begin_piece(Job& job, int index) {
  describe(job, index);
  return hand_over(memory_->descriptors[index_of(job)][index]);
}

bool DsaEngine::hand_over(const DsaDescriptor& descriptor) {
  if (given_up_ || closed_) return false;
  if (limits_.credits && in_queue_ >= limits_.credits) return false;
  for (int i = 0; i < kSubmitTries; ++i) {
    if (portal_->submit(&descriptor)) {
      ++in_queue_;
      refusals_ = 0;
      return true;
    }
    cpu_pause();
  }
  if (++refusals_ >= kMostRefusals) give_up("it took none of " + std::to_string(refusals_) + " descriptors");
  return false;
}

void DsaEngine::poll(Job& job) {
  const int j = index_of(job);
  const bool was_batched = job.batched;
  if (job.batched) {
    const uint8_t status = status_of(memory_->batch_records[j]);
    if (status) {
      job.batched = false;
      --in_queue_;
      if (!is(status, DsaStatus::success) && !is(status, DsaStatus::batch_failed)) note_error(status);
    }
  }
  for (int i = 0; !job.batched && i < job.pieces; ++i) {
    if (!job.piece[i].waiting) continue;
    const uint8_t status = status_of(memory_->records[j][i]);
    if (!status && !was_batched) continue;
    // A batch ended without one of its records. The kernel may still write the record (5.9), over a record of the next
    // job, until the queue is closed.
    if (!status) return abandon("it left records of a batch out");
    if (!was_batched) --in_queue_;
    settle(job, i, status);
  }
  if (job.waiting && now_ns() > job.deadline) {
    char text[80];
    std::snprintf(text, sizeof text, "it did not end a copy within %.3g s", static_cast<double>(copy_ns_) * 1e-9);
    abandon(text);
  }
}

void DsaEngine::settle(Job& job, int index, uint8_t status) {
  if (is(status, DsaStatus::success)) {
    job.piece[index].waiting = false;
    --job.waiting;
    return;
  }
  if (is(status, DsaStatus::page_fault) && resume(job, index)) return;
  if (status && !is(status, DsaStatus::page_fault)) note_error(status);
  finish_here(job, index);
}

// After a page fault: touches the rest of the piece, since faults come in runs, and lets the device continue.
bool DsaEngine::resume(Job& job, int index) {
  Piece& piece = job.piece[index];
  const DsaRecord record = memory_->records[index_of(job)][index];
  const bool known = !(record.fault_info & 1);  // 8.2.3: else the address is masked
  if (record.completed > piece.bytes || ++piece.faults > kMostFaults) return false;
  if (known && !lies_in(record.fault_address, piece.to, piece.bytes) &&
      !lies_in(record.fault_address, piece.from, piece.bytes)) {
    note_error(record.status);
    return false;
  }
  if (!record.result) {  // 8.3.4: the copy ran from the beginning
    piece.to += record.completed;
    piece.from += record.completed;
  }
  piece.bytes -= record.completed;
  if (!piece.bytes) {
    piece.waiting = false;
    --job.waiting;
    return true;
  }
  touch_pages(piece.to, piece.bytes);
  read_pages(piece.from, piece.bytes);
  job.deadline = now_ns() + copy_ns_;
  return begin_piece(job, index);
}

void DsaEngine::finish_here(Job& job, int index) {
  Piece& piece = job.piece[index];
  copy_here(piece.to, piece.from, piece.bytes);
  piece.waiting = false;
  --job.waiting;
}

void DsaEngine::copy_here(uint8_t* to, const uint8_t* from, int64_t bytes) {
  if (bytes <= 0) return;
  stream_(to, from, bytes);
  stream_fence();
}

void DsaEngine::note_error(uint8_t status) {
  char text[80];
  std::snprintf(text, sizeof text, "it ended %d copies with errors, the last with status 0x%02x", ++errors_,
                status & kDsaStatusMask);
  if (errors_ >= kMostErrors) give_up(text);
}

// Starts no new copies. Copies in flight may still complete.
void DsaEngine::give_up(const std::string& why) {
  if (given_up_) return;
  given_up_ = true;
  trouble_ = name_ + " is not used any more, streaming stores copy instead: " + why;
}

// Closes the queue, so that the device stops using memory. Makes the remaining copies here.
void DsaEngine::abandon(const std::string& why) {
  give_up(why);
  if (!closed_ && !portal_->close(close_ns_)) {
    stuck_ = true;
    char text[80];
    std::snprintf(text, sizeof text, ", nor let go of the memory within %.3g s more",
                  static_cast<double>(close_ns_) * 1e-9);
    trouble_ = name_ + " hangs: " + why + text + "; start again with --repack threads";
    fail(Status::native, "%s", trouble_.c_str());
  }
  closed_ = true;
  in_queue_ = 0;
  for (Job& job : jobs_) {
    job.batched = false;
    for (int i = 0; job.waiting && i < job.pieces; ++i)
      if (job.piece[i].waiting) finish_here(job, i);
  }
}

bool DsaEngine::works() {
  struct Trial {
    uint8_t from[kPage], to[kPage];
  };
  Trial* const trial = new Trial();  // leaked if done() throws: the device may still write to it
  for (size_t i = 0; i < kPage; ++i) trial->from[i] = static_cast<uint8_t>(i * 7 + 1);
  const Copy copy{trial->to, trial->from, static_cast<int64_t>(kPage)};
  const int64_t ticket = submit(&copy, 1);
  while (!done(ticket)) cpu_pause();
  const bool same = !std::memcmp(trial->to, trial->from, kPage);
  delete trial;
  return ticket && !errors_ && !given_up_ && same;
}

}  // namespace ckdist
