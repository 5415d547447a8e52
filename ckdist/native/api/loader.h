#ifndef CKDIST_API_LOADER_H
#define CKDIST_API_LOADER_H
#include <stdint.h>
#include "api/trace.h"
#ifdef __cplusplus
extern "C" {
#endif

/* A rank's shard of one weight matrix; the same bytes as ckdist::Weight in runtime/sliced_matrix.h. */
struct ckdist_matrix {
  int32_t type; /* ggml number */
  int64_t rows; /* output rows; the last tile of 16 is padded with zeros; of a stack the rows of all tiles */
  int64_t cols; /* columns held, a multiple of the type's block */
  int64_t tile_bytes;
  const uint8_t* tiles;
  const void* sliced; /* null: all tiles are packed */
};

/* Of a tensor of rows of `columns`, which has `stored` of them for each head: of each head `rows` from `first` on.
   transposed: these are the matrix's columns, and a head's columns its rows; of `every` columns that of number `lane`.
   Of a stack so of each of its matrices. */
struct ckdist_head_part {
  int64_t stored; /* 0: the matrix is the tensor */
  int64_t first, rows, columns;
  int32_t transposed;
  int64_t every, lane; /* 1 and 0: all columns */
};

/* How scales lie that stand in tensors of their own, beside a matrix's codes. */
enum ckdist_codes { ckdist_codes_whole, ckdist_codes_bytes, ckdist_codes_nibbles };
enum ckdist_scale_form { ckdist_scale_f32, ckdist_scale_f16, ckdist_scale_bf16, ckdist_scale_exponent };
struct ckdist_scales {
  int32_t codes;                /* enum ckdist_codes: bits of a column */
  int32_t form;                 /* enum ckdist_scale_form */
  int64_t rows_each, cols_each; /* that share a scale */
  int64_t rows, cols;           /* of scales in a tensor */
  int64_t first_row;            /* of the rows that share a tensor of scales, where the matrix begins */
  const int32_t* files;         /* of each matrix: where its scales are */
  const int64_t* offsets;
  const int32_t* zero_files; /* and its zero points, four bits each, eight rows in 32 bits; or null: all are 8 */
  const int64_t* zero_offsets;
};

/* Which part of a stored tensor a matrix takes: the rows of `row_ranges`, one range after the other, and columns
   [col_begin, col_end), whole blocks of both types or up to the last column. Of a stack these of each matrix, whose
   tiles follow one another. */
struct ckdist_matrix_plan {
  const char* name;       /* for messages */
  int64_t count;          /* matrices of a stack, all of one shape; else 1 */
  const int32_t* files;   /* of each: index into the loader's files */
  const int64_t* offsets; /* of each, in its file */
  int32_t source_type;    /* as stored */
  int32_t packed_type;    /* the same, or Q8_0 or Q4_K for a source of F32, F16 or BF16; Q8_0 or F32 for a part of heads
                             that is transposed */
  int32_t head_rows; /* > 0: row j of the first half of each head of this many rows is stored at 2 j, of the second at 2
                        j + 1 */
  int64_t rows, cols; /* of a whole matrix, or of the whole part of its heads */
  struct ckdist_head_part part;
  const struct ckdist_scales* scales; /* of codes alone, of which source_type is made; or null */
  int64_t col_begin, col_end;
  const int64_t* row_ranges; /* (range_count, 2): begin, end */
  int64_t range_count;
  int32_t cold; /* packed after all others */
};

/* Elements [begin, end) of a stored vector of F32, F16 or BF16, which become float32. */
struct ckdist_vector_plan {
  const char* name;
  int32_t file;
  int32_t source_type;
  int32_t head_rows; /* as in ckdist_matrix_plan */
  int32_t plus_one;  /* add 1 to every element */
  int32_t minus_exp; /* minus the exponential of every element is stored */
  int64_t offset;
  int64_t size;   /* of the whole vector */
  int64_t stored; /* > 0: of so many elements of the tensor the vector has one, that of number `lane` */
  int64_t lane;
  int64_t begin, end;
};

/* Shards of weights from files in one arena. Add everything, open, fill; the weights live until it is freed. */
typedef struct ckdist_loader ckdist_loader;

CKDIST_EXPORT int ckdist_loader_create(const char* const* paths, int path_count, ckdist_loader** out);
/* Parts of the file of this number still come in while it is open: only that it becomes shorter is an error. */
CKDIST_EXPORT int ckdist_loader_expect_writes(ckdist_loader* loader, int file);
/* Stops its threads first when they are still at work. */
CKDIST_EXPORT void ckdist_loader_free(ckdist_loader* loader);

/* The index of the matrix or vector among its kind. */
CKDIST_EXPORT int ckdist_loader_add_matrix(ckdist_loader* loader, const struct ckdist_matrix_plan* plan);
CKDIST_EXPORT int ckdist_loader_add_vector(ckdist_loader* loader, const struct ckdist_vector_plan* plan);

/* Bytes that the arena holds, and bytes of the files that are wanted. */
CKDIST_EXPORT int64_t ckdist_loader_arena_bytes(const ckdist_loader* loader);
CKDIST_EXPORT int64_t ckdist_loader_source_bytes(const ckdist_loader* loader);

/* Makes the arena, so that other processes of this host can map it where it is `shared`, and reads the vectors. From
   then on matrices can be multiplied with by an executable that knows the loader. */
CKDIST_EXPORT int ckdist_loader_open(ckdist_loader* loader, int shared);
/* Where the arena begins; null before ckdist_loader_open. */
CKDIST_EXPORT const void* ckdist_loader_arena(const ckdist_loader* loader);
/* By which others can map a shared arena, as long as the loader lives; else empty. Valid until the next call on this
 * thread. */
CKDIST_EXPORT const char* ckdist_loader_path(const ckdist_loader* loader);

/* Valid from ckdist_loader_open on. */
CKDIST_EXPORT const struct ckdist_matrix* ckdist_loader_matrix(const ckdist_loader* loader, int index);
CKDIST_EXPORT const float* ckdist_loader_vector(const ckdist_loader* loader, int index);
/* Where in the arena a matrix's states stand, which another rank that maps it must know. */
CKDIST_EXPORT int64_t ckdist_loader_states_offset(const ckdist_loader* loader, int index);

/* Maps the arena of another rank of this host, of so many bytes as its ckdist_loader_arena_bytes: the peer's index, and
 * where its arena is. */
CKDIST_EXPORT int ckdist_loader_add_peer(ckdist_loader* loader, const char* path, int64_t arena_bytes);
CKDIST_EXPORT const void* ckdist_loader_peer_arena(const ckdist_loader* loader, int peer);
/* A matrix that a peer packs while this rank computes, before ckdist_loader_fill: `plan` is what the peer planned, by
 * this rank's files. */
CKDIST_EXPORT int ckdist_loader_add_peer_matrix(ckdist_loader* loader, int peer, const struct ckdist_matrix_plan* plan,
                                                int64_t tiles_offset, int64_t states_offset,
                                                const struct ckdist_matrix** out);

/* A DSA queue where there is one, a DSA queue, or the threads' own stores. */
enum ckdist_copy_engine { ckdist_copy_engine_auto, ckdist_copy_engine_dsa, ckdist_copy_engine_threads };

/* How the arena is filled. */
struct ckdist_filling {
  int32_t threads;            /* while nothing else runs */
  int32_t background;         /* steps run meanwhile */
  int32_t copy_engine;        /* enum ckdist_copy_engine */
  double until;               /* of the packed bytes: where filling ends for good, below 1 */
  struct ckdist_trace* trace; /* where its threads get lanes, which outlives the loader; or null */
};
CKDIST_EXPORT int ckdist_loader_fill(ckdist_loader* loader, const struct ckdist_filling* filling);
/* 1 when its threads have ended, 0 when `milliseconds` passed before, negative when filling failed. */
CKDIST_EXPORT int ckdist_loader_wait(ckdist_loader* loader, int milliseconds);
/* Negative when filling failed, or a file that is still needed has changed. */
CKDIST_EXPORT int ckdist_loader_check(ckdist_loader* loader);
/* While `held`, threads that fill in the background do nothing. */
CKDIST_EXPORT void ckdist_loader_hold(ckdist_loader* loader, int held);
/* Ends filling where it is. */
CKDIST_EXPORT void ckdist_loader_stop(ckdist_loader* loader);

struct ckdist_filled {
  int64_t stored_done; /* wanted bytes of the files that this rank has packed */
  int64_t bytes;       /* packed, in all */
  int64_t ready;
  int64_t kept;     /* of slices that this rank's steps have packed and kept, also in other ranks' arenas */
  double seconds;   /* since ckdist_loader_fill, until all was ready */
  int32_t finished; /* all is ready, on all ranks that this one reads, and the files are given back */
  char copy_engine[64];
  char trouble[200]; /* why a device was given up meanwhile; else empty */
};
CKDIST_EXPORT void ckdist_loader_filled(ckdist_loader* loader, struct ckdist_filled* out);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
