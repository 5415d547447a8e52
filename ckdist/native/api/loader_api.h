#pragma once
#include "api/export.h"
#include "api/trace_api.h"

/* A rank's shard of one weight matrix. It has the same bytes as ckdist::Weight in runtime/sliced_matrix.h. */
struct ckdist_matrix {
  int32_t type; /* ggml number */
  int64_t rows; /* output rows; the last tile of 16 is padded with zeros; of a stack: rows of all tiles */
  int64_t cols; /* columns of this shard, a multiple of the type's block */
  int64_t tile_bytes;
  const uint8_t* tiles;
  int64_t first_column, row_columns; /* 0: of products with some of the columns, which are made while steps run */
  const void* sliced;                /* null: all tiles are packed */
  double scale;                      /* of an adapter's matrix A in a slot; else unused */
};

/* The rows that a matrix takes of each head of a tensor. The tensor has rows of `columns` elements, `stored` rows
   for each head. The matrix takes `rows` rows from `first` on. transposed: these rows are the matrix's columns, and
   a head's columns are its rows; of every `every` runs of `width` columns only number `lane` is taken. The same for
   each matrix of a stack. */
struct ckdist_head_part {
  int64_t stored; /* 0: the matrix is the tensor */
  int64_t first, rows, columns;
  int32_t transposed;
  int64_t every, lane; /* 1 and 0: all columns */
  int64_t width;       /* not 0 if `transposed` */
};

/* The layout of codes and scales in separate tensors. Codes of `columns` are words of eight columns of a row, [columns
   / 8][rows]; of `rows` eight rows of a column, [columns][rows / 8]. Their scales are transposed as well. */
enum ckdist_codes { ckdist_code_whole, ckdist_code_bytes, ckdist_code_nibbles, ckdist_code_columns, ckdist_code_rows };
enum ckdist_scale { ckdist_scale_f32, ckdist_scale_f16, ckdist_scale_bf16, ckdist_scale_exponent, ckdist_scale_e4m3 };
struct ckdist_scales {
  enum ckdist_codes codes; /* bits per column */
  enum ckdist_scale form;
  int64_t rows_each, cols_each; /* rows and columns that share a scale */
  int64_t rows, cols;           /* shape of a scale tensor */
  int64_t first_row;            /* the matrix's first row among the rows that share this scale tensor */
  const int32_t* files;         /* for each matrix: file and offset of its scales */
  const int64_t* offsets;
  const int32_t* zero_files; /* for each matrix: its zero points, 4 bits, 8 rows in 32 bits; null: all are 8 */
  const int64_t* zero_offsets;
  int32_t zero_added;   /* is added to each 32 bits of zero points */
  const float* factors; /* only for e4m3, for each matrix: its scales are multiplied by it */
  const int32_t* order; /* the stored column of each column, if groups are not runs of columns; or null */
  int64_t order_count;
};

/* The part of a stored tensor that a matrix takes: the concatenated rows of `row_ranges`, and columns [col_begin,
   col_end): whole blocks of both types, or up to the last column. In a stack each matrix has these rows and columns,
   and its tiles follow those of the one before. */
struct ckdist_matrix_plan {
  const char* name;       /* for messages */
  int64_t count;          /* matrices of a stack, all of one shape; else 1 */
  const int32_t* files;   /* for each matrix: index into the loader's files */
  const int64_t* offsets; /* for each matrix: offset in its file */
  int32_t source_type;    /* as stored */
  /* source_type; or Q8_0 or Q4_K for a source of F32, F16 or BF16; Q8_0 or F32 for a transposed part of heads. */
  int32_t packed_type;
  /* > 0: heads of this many rows are stored interleaved. Row j of the first half is stored at 2 j, of the second at
     2 j + 1. */
  int32_t head_rows;
  int64_t rows, cols; /* shape of a whole matrix, or of the whole part of its heads */
  struct ckdist_head_part part;
  const struct ckdist_scales* scales; /* only for codes, from which source_type is made; or null */
  int64_t col_begin, col_end;
  const int64_t* row_ranges; /* (range_count, 2): begin, end */
  int64_t range_count;
  int32_t cold;   /* packed after all others */
  int32_t mapped; /* never packed: steps read its rows in the file */
};

/* Elements [begin, end) of a stored vector of F32, F16 or BF16, which are converted to float32. */
struct ckdist_vector_plan {
  const char* name;
  int32_t file;
  int32_t source_type;
  int32_t head_rows; /* as in ckdist_matrix_plan */
  int32_t plus_one;  /* add 1 to every element */
  int32_t exp_sign;  /* 1, -1: the file stores exp_sign * exp(x) of every element x */
  float factor;      /* on every element */
  int64_t offset;
  int64_t size;   /* size of the whole vector */
  int64_t stored; /* > 0: the vector takes element `lane` of every `stored` elements of the tensor */
  int64_t lane;
  int64_t begin, end;
};

/* Shards of weights from files in one arena. Order of calls: add everything, open, fill. The weights live until
   ckdist_loader_free. */
typedef struct ckdist_loader ckdist_loader;

CKDIST_EXPORT int ckdist_loader_create(const char* const* paths, int path_count, ckdist_loader** out);
/* Announces that parts of this file are still being written while it is open: only a shorter file is an error. */
CKDIST_EXPORT int ckdist_loader_expect_writes(ckdist_loader* loader, int file);
/* Stops its threads first if they are still working. */
CKDIST_EXPORT void ckdist_loader_free(ckdist_loader* loader);

/* Return the index of the matrix or vector among its kind. */
CKDIST_EXPORT int ckdist_loader_add_matrix(ckdist_loader* loader, const struct ckdist_matrix_plan* plan);
CKDIST_EXPORT int ckdist_loader_add_vector(ckdist_loader* loader, const struct ckdist_vector_plan* plan);

/* Bytes of the arena, and bytes to read from the files. */
CKDIST_EXPORT int64_t ckdist_loader_arena_bytes(const ckdist_loader* loader);
CKDIST_EXPORT int64_t ckdist_loader_source_bytes(const ckdist_loader* loader);

/* Allocates the arena and reads the vectors. `shared`: other processes of this host can map the arena. `kept`: the path
   of a shared arena that a loader with the same plan has filled, perhaps in part; or "". After this call an executable
   that has the loader can multiply by the matrices. */
CKDIST_EXPORT int ckdist_loader_open(ckdist_loader* loader, int shared, const char* kept);
/* Bytes of the kept arena that were packed. */
CKDIST_EXPORT int64_t ckdist_loader_kept_bytes(const ckdist_loader* loader);
/* The beginning of the arena; null before ckdist_loader_open. */
CKDIST_EXPORT const void* ckdist_loader_arena(const ckdist_loader* loader);
/* The path for mapping a shared arena in other processes, while the loader lives; else empty. Valid until the next
   call on this thread. */
CKDIST_EXPORT const char* ckdist_loader_path(const ckdist_loader* loader);

/* Valid after ckdist_loader_open. */
CKDIST_EXPORT const struct ckdist_matrix* ckdist_loader_matrix(const ckdist_loader* loader, int index);
CKDIST_EXPORT const float* ckdist_loader_vector(const ckdist_loader* loader, int index);
/* Offset of a matrix's states in the arena, for other ranks that map it. */
CKDIST_EXPORT int64_t ckdist_loader_states_offset(const ckdist_loader* loader, int index);

/* Maps the arena of another rank of this host. arena_bytes: its ckdist_loader_arena_bytes. Returns the peer's index;
   ckdist_loader_peer_arena returns its address. */
CKDIST_EXPORT int ckdist_loader_add_peer(ckdist_loader* loader, const char* path, int64_t arena_bytes);
CKDIST_EXPORT const void* ckdist_loader_peer_arena(const ckdist_loader* loader, int peer);
/* Adds a matrix that a peer packs while this rank computes; call it before ckdist_loader_fill. `plan`: the peer's
   plan, with this rank's file indices. */
CKDIST_EXPORT int ckdist_loader_add_peer_matrix(ckdist_loader* loader, int peer, const struct ckdist_matrix_plan* plan,
                                                int64_t tiles_offset, int64_t states_offset,
                                                const struct ckdist_matrix** out);

/* How the arena is filled. */
struct ckdist_filling {
  int32_t threads;            /* while no step runs */
  int32_t background;         /* steps run at the same time */
  double until;               /* part of the packed bytes at which filling ends for good, if below 1 */
  struct ckdist_trace* trace; /* receives a lane for each thread and must outlive the loader; or null */
};
CKDIST_EXPORT int ckdist_loader_fill(ckdist_loader* loader, const struct ckdist_filling* filling);
/* Returns 1 if its threads have ended, 0 after `milliseconds`, a negative status if filling failed. */
CKDIST_EXPORT int ckdist_loader_wait(ckdist_loader* loader, int milliseconds);
/* Returns a negative status if filling failed, or a file that is still needed has changed. */
CKDIST_EXPORT int ckdist_loader_check(ckdist_loader* loader);
/* While `held` is not 0, background threads pause. */
CKDIST_EXPORT void ckdist_loader_hold(ckdist_loader* loader, int held);
/* Stops filling at its present state. */
CKDIST_EXPORT void ckdist_loader_stop(ckdist_loader* loader);

struct ckdist_filled {
  int64_t stored_done; /* bytes of the files that this rank has packed */
  int64_t bytes;       /* packed bytes of all matrices */
  int64_t ready;
  int64_t kept;     /* bytes of slices that this rank's steps have packed and kept, also in other ranks' arenas */
  double seconds;   /* from ckdist_loader_fill until all was ready */
  int32_t finished; /* all is ready on all ranks that this one reads, and the files are released */
};
CKDIST_EXPORT void ckdist_loader_filled(ckdist_loader* loader, struct ckdist_filled* out);
