#pragma once
#include "api/attention_api.h"
#include "api/export.h"
#include "api/loader_api.h"
#include "api/steps_api.h"

/* Lowered programs that serve or train. Fields of the other purpose are 0. Absent indices are -1. */

/* Sharding of a rank's tokens over hosts between the products that need all tokens (comm/row_exchange.h). own: the
   ranks of a host have different tokens. ckdist_host_rows_alike: they have the same tokens. */
enum ckdist_host_rows { ckdist_host_rows_none, ckdist_host_rows_own, ckdist_host_rows_alike };

/* Steps of one run. cleared: parameters whose gradients start as zeros, because no product overwrites them. */
struct ckdist_step_list {
  const struct ckdist_step* const* steps;
  const int32_t* cleared;
  int32_t count, cleared_count;
};

/* A weight of a training. */
struct ckdist_parameter {
  int64_t offset, rows, cols; /* offset in floats in the arenas of parameters and gradients; rows is 1 for a vector */
  int64_t matrices;           /* number of a stack's matrices, whose rows are counted together; else 1 */
  /* struct ckdist_matrix of a frozen parameter in its file's format; null: the parameter is in the arena. */
  const void* matrix;
};
/* Matrices packed for a product: one as it is, or several transposed and side by side, each padded to 16 columns. */
struct ckdist_pack {
  int32_t transposed, count;
  const int32_t* parameters;
};

/* A lowered program: lists of steps over one numbering of values and one arena. A plan that serves has one list. */
struct ckdist_execution_plan {
  const struct ckdist_step_list* lists;
  int32_t list_count;
  const struct ckdist_value* values;
  int32_t value_count;
  int64_t arena_bytes;
  /* serving */
  const void* const* matrices; /* struct ckdist_matrix of the loader */
  int32_t matrix_count;
  const float* const* vectors;
  int32_t vector_count;
  /* Each rank of a host has the tokens [ceil(tokens * rank / size), ceil(tokens * (rank + 1) / size)) of a batch,
     where rank and size count the host's ranks. */
  int32_t tokens_sharded;
  enum ckdist_host_rows host_rows;
  /* Rows of products are prompts' rows, in the format of ckdist_prompt_format. */
  int32_t prompts;
  /* training */
  const struct ckdist_parameter* parameters;
  int32_t parameter_count;
  const struct ckdist_pack* packs;
  int32_t pack_count;
};

/* Arrays of a layer's cache. Values of latent attention are its latent vectors. */
enum ckdist_array {
  ckdist_array_keys,
  ckdist_array_values,
  ckdist_array_latent,
  ckdist_array_rope, /* rotated keys that belong to the latent vectors */
  ckdist_array_state,
  ckdist_array_convolution, /* the last inputs of a short convolution, oldest first */
  ckdist_array_index,       /* keys that choose the positions of sparse attention: one head, in f32 or f16 */
  /* Keys and gates of a sequence's last tokens, and the entries that windows of tokens are compressed to, one after
     another in f32 or f16; the same of an index. An entry takes the place of its tokens in the window's last block. */
  ckdist_array_rows,
  ckdist_array_entries,
  ckdist_array_index_rows,
  ckdist_array_index_entries
};
/* token: an array has rows for each token, in blocks. sequence: rows for each sequence, in slots, in f32. Latent
   vectors of a sequence are its last ones; their type is that of the copies that a step reads. */
enum ckdist_lifetime { ckdist_lifetime_token, ckdist_lifetime_sequence };
/* One array of a layer's cache on this rank: (heads, rows, width) for a token or for a sequence. */
struct ckdist_cache_array {
  enum ckdist_array name;
  enum ckdist_lifetime lifetime;
  int32_t type; /* number of a weight type */
  int32_t heads, rows, width;
};
/* Bytes of the arrays of one layer in a block, or in a slot. */
CKDIST_EXPORT int64_t ckdist_cache_bytes(const struct ckdist_cache_array* arrays, int32_t count,
                                         enum ckdist_lifetime lifetime);
/* Bytes from one block to the next, if the arrays of all layers have `bytes` in a block. */
CKDIST_EXPORT int64_t ckdist_block_stride(int64_t bytes);

/* One layer on this rank: the arrays of its cache, and the heads that read them. */
struct ckdist_layer {
  const struct ckdist_cache_array* arrays;
  int32_t array_count;
  /* attention: local kv-heads, or groups of heads that read the latent vectors together */
  int32_t kv_heads;
  const int32_t* heads_per_kv; /* (kv_heads,) query heads that share each of them */
  /* over all ranks, for sums over all heads */
  int32_t total_heads, total_kv_heads, first_head;
  /* (total_kv_heads,): if tokens are sharded, the position of each kv-head in a token's row */
  const int32_t* key_places;
  const int32_t* key_head_of; /* linear attention: (heads of the state,) local key head of each */
};

struct ckdist_program {
  const struct ckdist_execution_plan* plans; /* serving: at most 12, which use the same cache; training: one */
  int32_t plan_count;
  int64_t max_tokens;
  int64_t vocab; /* over all ranks */
  struct ckdist_rope ropes[4];
  /* Rows on their way to other pipeline stages: (in_flight,) buffers; null for one stage. Serving: one for each batch
     that is published before the first of them has run on rank 0. Training: one for each message. */
  int32_t in_flight;
  float* const* outgoing;

  /* serving */
  int64_t max_sequences, max_outputs, context_length;
  int64_t hidden;          /* floats of a row of hidden states; 0: no plan returns them */
  int64_t exchange_floats; /* floats of one value that other ranks read, the same on every rank */
  const struct ckdist_layer* layers;
  int32_t layer_count;
  int32_t experts;     /* maximum experts of a layer; 0: no layer has experts */
  int32_t adapters;    /* slots for adapters of sequences */
  int64_t state_slots; /* slots, each for all layers' states of one sequence; 0: no layer has a state */
  int64_t blocks;
  int64_t embedding_rows, embedding_width; /* maximum rows of embeddings in a batch, and their floats */
  struct ckdist_loader* loader;            /* packs matrices that are not packed yet; null: all are packed */
  int32_t previous, next;                  /* ranks of the job in the neighbouring stages; -1: none */

  /* training */
  int64_t kept_bytes; /* of values that are kept between two passes */
  /* Floats of trained parameters at the beginning of the parameters' arena. Each step that multiplies by them packs
     them. The parameters after them are packed once, unless a trained matrix is in the same pack. Then only vectors
     and embeddings are read again. */
  int64_t trained_floats;
  int32_t bf16; /* products read bfloat16, else float32 */
  float* parameter_arena;
  uint16_t* narrow_parameters; /* the trained parameters as bfloat16; parameter_arena has those after them only.
                                  Null: all are in parameter_arena */
  float* gradient_arena;
  /* ZeRO: rank r of those that sum gradients owns the floats [share_ends[r - 1], share_ends[r]) of the trained
     parameters. Each pass adds the sums of this rank's own floats to gradient_share, and frees the pages of
     gradient_arena. Null: sums are on all ranks, in gradient_arena. */
  const int64_t* share_ends;
  float* gradient_share;
};
