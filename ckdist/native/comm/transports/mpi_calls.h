// MPI's point-to-point calls, from whichever implementation the launcher brought.
//
// The library is not linked: the caller hands over the addresses of three functions and the values of two handles,
// which are ints in some implementations and pointers in others and travel in one register either way.
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

}  // namespace ckdist
