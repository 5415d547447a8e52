#pragma once
#include <stdint.h>

/* The steps of lowered programs: a struct for each kind, which begins with struct ckdist_step. This file has their
   common parts; the kinds are in steps_inference_api.h and steps_training_api.h. Fields that name an operand are
   indices into the program's values, matrices, vectors, parameters or packs; -1 if absent. Each kind is implemented in
   a file of runtime/steps. */

/* The rows of a step.
   tokens: the batch's tokens, or this rank's own tokens if tokens are sharded.
   selected: all tokens whose logits are computed.
   local_selected: the selected tokens among this rank's own.
   host: the rank's tokens that its host has, if hosts shard them. */
enum ckdist_rows { ckdist_rows_tokens, ckdist_rows_selected, ckdist_rows_local_selected, ckdist_rows_host };

struct ckdist_step {
  int32_t kind;
  enum ckdist_rows rows;
};

/* Consecutive operands: the shards of one. */
struct ckdist_span {
  int32_t first, count;
};

enum ckdist_gate {
  ckdist_gate_none = -1,
  ckdist_gate_silu = 0,
  ckdist_gate_gelu_tanh = 1,
  ckdist_gate_sigmoid = 2,
  ckdist_gate_clamped_swiglu = 3,
  ckdist_gate_gelu = 4,
  ckdist_gate_tanh = 5,
  ckdist_gate_relu = 6,
  ckdist_gate_relu2 = 7,
  ckdist_gate_clamped_silu = 8,
  ckdist_gate_softplus = 9,
  ckdist_gate_limited_silu = 10, /* with 256 * 16 * limit added: a limit in sixteenths */
  ckdist_gate_situ = 11,
  ckdist_gate_identity = 12
};
enum ckdist_rope_table { ckdist_rope_none = -1, ckdist_rope_global = 0, ckdist_rope_local = 1 };
enum ckdist_activation_format { ckdist_activation_f32, ckdist_activation_bf16, ckdist_activation_q8 };

/* Where a value lies. */
enum ckdist_place {
  ckdist_place_arena,
  ckdist_place_slot, /* read by other ranks: this rank's summand, or its rows */
  ckdist_place_logits,
  ckdist_place_hidden,      /* selected rows of hidden states, which every rank computes */
  ckdist_place_activations, /* rows in the format that products read */
  ckdist_place_tokens,      /* all tokens' rows, each in the slot of the rank that has the token */
  ckdist_place_columns,     /* local tokens' rows; each rank's columns are in its slot */
  ckdist_place_outputs,     /* all selected rows, each in the slot of the rank that has its token */
  ckdist_place_sums         /* partial over hosts: all tokens' rows; each rank of a host writes its own */
};

struct ckdist_value {
  enum ckdist_place place;
  int32_t format;       /* enum ckdist_activation_format, of activations */
  int32_t selected;     /* it has only selected rows; else a step of selected rows reads them at their tokens */
  int32_t sum;          /* a value that receives the sums over hosts for this host's rows; or -1 */
  int64_t width;        /* floats from row to row; activations: columns of the matrices that read them */
  int64_t offset;       /* arena: bytes. Slot, and places read from slots: index. Logits: first column */
  int64_t lead;         /* columns before the value's own */
  int64_t floats;       /* activations: their own columns */
  int64_t room;         /* training: elements per row with padding; zeros after the width */
  int64_t stride;       /* bytes from row to row */
  int64_t kept;         /* training: true if kept between two passes of a batch */
  const int32_t* order; /* activations: the source's column of each column; null: the same */
};

enum ckdist_scores { ckdist_scores_softmax, ckdist_scores_sigmoid, ckdist_scores_sqrt_softplus };

/* The choice of experts; see Routing in program/routing.py. */
struct ckdist_routing {
  int32_t used, scores; /* enum ckdist_scores */
  int32_t renormalise, groups, top_groups, group_scores;
  float scale;
};
