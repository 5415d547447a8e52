// MPI's point-to-point calls, from the launcher's MPI implementation.
//
// The library is not linked: the caller passes the addresses of the functions and the values of two handles. Handles
// are ints in some implementations and pointers in others; both are passed in one register.
#pragma once

namespace ckdist {

struct MpiCalls {
  int (*isend)(const void* data, int count, void* datatype, int peer, int tag, void* comm, void* request);
  int (*irecv)(void* data, int count, void* datatype, int peer, int tag, void* comm, void* request);
  int (*test)(void* request, int* flag, void* status);
  void* byte;  // MPI_BYTE
  void* comm;  // a communicator only for this transport
};

}  // namespace ckdist
