#ifndef CKDIST_API_LOADER_H
#define CKDIST_API_LOADER_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* A rank's shard of one weight matrix, packed; the same bytes as ckdist::Matrix in kernels/linear.h. */
struct ckdist_matrix {
  int32_t type;       /* ggml number */
  int64_t rows;       /* output rows; the last tile of 16 is padded with zeros */
  int64_t cols;       /* columns held, a multiple of the type's block */
  int64_t tile_bytes;
  const uint8_t* tiles;
};

/* Which part of a stored tensor a matrix takes: the rows of `row_ranges`, one range after the other, and columns
   [col_begin, col_end), whole blocks of both types. */
struct ckdist_matrix_plan {
  const char* name;           /* for messages */
  int32_t file;               /* index into the loader's files */
  int32_t source_type;        /* as stored */
  int32_t packed_type;        /* the same, or Q8_0 or Q4_K for a source of F32, F16 or BF16 */
  int32_t head_rows;          /* > 0: row j of the first half of each head of this many rows is stored at 2 j, of the second at 2 j + 1 */
  int64_t offset;             /* of the tensor in its file */
  int64_t rows, cols;         /* of the whole tensor */
  int64_t col_begin, col_end;
  const int64_t* row_ranges;  /* (range_count, 2): begin, end */
  int64_t range_count;
};

/* Elements [begin, end) of a stored vector of F32, F16 or BF16, which become float32. */
struct ckdist_vector_plan {
  const char* name;
  int32_t file;
  int32_t source_type;
  int32_t head_rows;          /* as in ckdist_matrix_plan */
  int32_t plus_one;           /* add 1 to every element */
  int64_t offset;
  int64_t size;               /* of the whole vector */
  int64_t begin, end;
};

/* Reads shards of weights from files into one arena. Add everything, start, wait; the weights live until it is freed. */
typedef struct ckdist_loader ckdist_loader;

CKDIST_EXPORT int ckdist_loader_create(const char* const* paths, int path_count, ckdist_loader** out);
/* Stops its threads first when they are still at work. */
CKDIST_EXPORT void ckdist_loader_free(ckdist_loader* loader);

/* The index of the matrix or vector among its kind. */
CKDIST_EXPORT int ckdist_loader_add_matrix(ckdist_loader* loader, const struct ckdist_matrix_plan* plan);
CKDIST_EXPORT int ckdist_loader_add_vector(ckdist_loader* loader, const struct ckdist_vector_plan* plan);

/* Bytes that the arena holds, and bytes of the files that are wanted. */
CKDIST_EXPORT int64_t ckdist_loader_arena_bytes(const ckdist_loader* loader);
CKDIST_EXPORT int64_t ckdist_loader_source_bytes(const ckdist_loader* loader);

/* Where the arena begins; null before ckdist_loader_start. */
CKDIST_EXPORT const void* ckdist_loader_arena(const ckdist_loader* loader);

/* Allocates the arena, so that other processes of this host can map it where it is `shared`, and starts `threads` threads. */
CKDIST_EXPORT int ckdist_loader_start(ckdist_loader* loader, int threads, int shared);
/* By which others can map a shared arena, as long as the loader lives; else empty. Valid until the next call on this thread. */
CKDIST_EXPORT const char* ckdist_loader_path(const ckdist_loader* loader);
/* 1 when all is loaded, 0 when `milliseconds` passed before, negative when loading failed. */
CKDIST_EXPORT int ckdist_loader_wait(ckdist_loader* loader, int milliseconds);
/* Wanted bytes that are loaded so far. */
CKDIST_EXPORT int64_t ckdist_loader_progress(const ckdist_loader* loader);

/* Valid once ckdist_loader_wait returned 1. */
CKDIST_EXPORT const struct ckdist_matrix* ckdist_loader_matrix(const ckdist_loader* loader, int index);
CKDIST_EXPORT const float* ckdist_loader_vector(const ckdist_loader* loader, int index);

/* The arena of another rank of this host. */
typedef struct ckdist_peer_arena ckdist_peer_arena;
CKDIST_EXPORT int ckdist_peer_arena_open(const char* path, int64_t bytes, ckdist_peer_arena** out);
CKDIST_EXPORT void ckdist_peer_arena_close(ckdist_peer_arena* arena);
CKDIST_EXPORT const void* ckdist_peer_arena_data(const ckdist_peer_arena* arena);

#ifdef __cplusplus
} // extern "C"
#endif
#endif
