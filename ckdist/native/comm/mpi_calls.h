// MPI's point-to-point calls, from whichever implementation the launcher brought.
//
// The library is not linked: the caller hands over the addresses of three functions and the values of two handles, which are
// ints in some implementations and pointers in others and travel in one register either way.
#pragma once
#include <cstdint>

namespace ckdist {

struct MpiCalls {
  int (*isend)(const void* data, int count, void* datatype, int peer, int tag, void* comm, void* request);
  int (*irecv)(void* data, int count, void* datatype, int peer, int tag, void* comm, void* request);
  int (*test)(void* request, int* flag, void* status);
  void* byte;  // MPI_BYTE
  void* comm;  // a communicator of our own
};

// A send or receive that was begun, in a place large enough for any implementation's MPI_Request.
struct MpiRequest {
  alignas(16) uint8_t handle[16];
  int peer;

  // True once it is complete; `failed` when MPI reports an error instead.
  bool complete(const MpiCalls& calls, bool* failed) {
    alignas(16) uint8_t status[256];  // larger than any implementation's MPI_Status
    int flag = 0;
    *failed = calls.test(handle, &flag, status) != 0;
    return flag != 0;
  }
};

enum MpiTag : int { kTagMessage = 1, kTagPart, kTagSlice, kTagSum, kTagLogits, kTagShare, kTagAnswer };

constexpr int32_t kPulse = -1;  // in place of a message's length: rank 0 is well, answer

}  // namespace ckdist
