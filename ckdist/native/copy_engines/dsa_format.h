// Descriptors (64 bytes) and completion records (32 bytes) of an Intel Data Streaming Accelerator.
//
// From Intel's Data Streaming Accelerator Architecture Specification, revision 3.0 (341204-006); comments name its
// sections. Numbers are little-endian, as on the CPUs that have the device. Linux describes the same format in
// linux/idxd.h; dsa_engine.cpp compares both at compile time if that header is installed.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ckdist {

enum class DsaOperation : uint32_t { batch = 0x01, memory_move = 0x03 };  // 8.1.2

// 8.1.3. If all cache control flags are 0, the device writes data to memory (8.1.3.1), as streaming stores do. Every
// device allows it.
enum DsaFlag : uint32_t {
  kDsaBlockOnFault = 1u << 1,   // reserved for batches, and if the queue does not allow it
  kDsaRecordAddress = 1u << 2,  // the completion record's address is valid
  kDsaRequestRecord = 1u << 3,  // a record is written even after success
};

struct alignas(64) DsaDescriptor {
  uint32_t submitter;  // 8.1.1: PASID and privilege, set by ENQCMD or the queue
  uint32_t operation;  // flags in bits 23:0, the operation in bits 31:24
  uint64_t record;     // address of the completion record
  uint64_t source;     // of a batch: address of its descriptors, aligned to 64 bytes
  uint64_t destination;
  uint32_t size;  // bytes; of a batch: number of its descriptors, at least 2
  uint16_t interrupt;
  uint16_t reserved;
  uint8_t specific[24];
};
static_assert(sizeof(DsaDescriptor) == 64 && alignof(DsaDescriptor) == 64, "8.1: a descriptor is 64 bytes");
static_assert(offsetof(DsaDescriptor, submitter) == 0, "8.1.1");
static_assert(offsetof(DsaDescriptor, operation) == 4, "8.1.2, 8.1.3");
static_assert(offsetof(DsaDescriptor, record) == 8, "8.1.4");
static_assert(offsetof(DsaDescriptor, source) == 16, "8.1.5");
static_assert(offsetof(DsaDescriptor, destination) == 24, "8.1.6");
static_assert(offsetof(DsaDescriptor, size) == 32, "8.1.7");
static_assert(offsetof(DsaDescriptor, interrupt) == 36, "8.1.8");
static_assert(offsetof(DsaDescriptor, reserved) == 38 && offsetof(DsaDescriptor, specific) == 40, "8.3.4");

// 5.8.1; only the values that this project distinguishes.
enum class DsaStatus : uint8_t {
  none = 0x00,
  success = 0x01,
  page_fault = 0x03,
  batch_failed = 0x05,
  batch_page_fault = 0x06
};
constexpr uint8_t kDsaStatusMask = 0x3f;  // 8.2.1: bit 7 is 1 if the faulting access was a write

struct alignas(32) DsaRecord {
  uint8_t status;  // 0 until the device writes the record
  uint8_t result;  // of a move with a page fault: 1 if it ran from the end to the beginning (8.3.4)
  uint8_t fault_info;
  uint8_t unused;
  uint32_t completed;  // bytes before a page fault; of a batch: descriptors processed
  uint64_t fault_address;
  uint32_t invalid_flags;  // in bits 23:0, for status 0x11
  uint8_t specific[12];
};
static_assert(sizeof(DsaRecord) == 32 && alignof(DsaRecord) == 32,
              "8.2: a completion record is 32 bytes, aligned to 32");
static_assert(offsetof(DsaRecord, status) == 0, "8.2.1");
static_assert(offsetof(DsaRecord, result) == 1, "8.2.2");
static_assert(offsetof(DsaRecord, fault_info) == 2, "8.2.3");
static_assert(offsetof(DsaRecord, completed) == 4, "8.2.4");
static_assert(offsetof(DsaRecord, fault_address) == 8, "8.2.5");
static_assert(offsetof(DsaRecord, invalid_flags) == 16 && offsetof(DsaRecord, specific) == 20, "8.2.6");

}  // namespace ckdist
