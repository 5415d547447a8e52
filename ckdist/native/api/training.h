#ifndef CKDIST_API_TRAINING_H
#define CKDIST_API_TRAINING_H
#include <stdint.h>
#include "api/attention.h"
#include "api/communicator.h"
#ifdef __cplusplus
extern "C" {
#endif

/* A lowered training program: steps over values of (tokens, width) elements, as program/lower_training.py makes them.
   Gradients are added to what their place in the arena holds. Indices that are absent are -1. Steps read and write
   operands and floats alike, but for products: what they multiply are operands. */

enum {
  ckdist_train_embed = 0,         /* out[0] = rows of parameter[0] */
  ckdist_train_scale = 1,         /* out[0] = in[0] f[0] */
  ckdist_train_add = 2,           /* out[0] = in[0] + in[1] */
  ckdist_train_rms_norm = 3,      /* out[0] = rms_norm(in[0], parameter[0]) over i[0] elements each; f[0]: eps */
  ckdist_train_rms_norm_grad = 4, /* in: x, dy; out[0] = dx (+ in[2]), gradient[0] += dw */
  ckdist_train_linear = 5,        /* out[m] = in[0] times pack[m] + parameter[m]; of one output, + in[1] */
  ckdist_train_linear_grad = 6,   /* out[0] = in[0..], which lie side by side, times pack[0] */
  ckdist_train_linear_weight_grad =
      7, /* in: x, dy...; gradient[m] += dy[m] turned times x; i[0]: bit m where nothing was added to it before */
  ckdist_train_bias_grad = 8,      /* gradient[m] += sum over the tokens of in[m] */
  ckdist_train_rope = 9,           /* out[0] = in[0] rotated; i[0]: table, i[1]: 1 for back */
  ckdist_train_attend = 10,        /* in: q, k, v; out: o, log-sum-exp; i[0]: window; f[0]: scale, f[1]: soft cap */
  ckdist_train_attend_grad = 11,   /* in: q, k, v, o, log-sum-exp, do; out: dq, dk, dv; i and f likewise */
  ckdist_train_gated = 12,         /* out[0] = f(in[0]) in[1]; i[0]: the function */
  ckdist_train_gated_grad = 13,    /* in: gate, up, dy; out: d_gate, d_up */
  ckdist_train_cross_entropy = 14, /* the loss of in[0] times pack[0]; out[0] = dx by pack[1], gradient[0] += d head;
                                      i[0] likewise; f[0]: soft cap */
  ckdist_train_embed_grad = 15,    /* gradient[0] += rows of in[0] */
  ckdist_train_reduce = 16,        /* begins the all_reduce of gradients [i[0], i[1]) */
  ckdist_train_operand = 17        /* out[0] = in[0] */
};

struct ckdist_training_step {
  int32_t op;
  int32_t in[6], out[4], pack[4], parameter[4], gradient[4];
  int64_t i[2];
  float f[2];
};
struct ckdist_training_value {
  int64_t offset, width; /* bytes in the arena; elements of a token */
  int64_t room, stride;  /* elements that its row has place for, zeros behind the width; bytes from a row to the next */
  int32_t operand;       /* elements are as products read them, else floats */
};
struct ckdist_training_parameter {
  int64_t offset, rows, cols; /* floats in the arenas of parameters and of gradients; rows is 1 of a vector */
};
/* Matrices in the form of a product: one as it is, or several turned and side by side, each padded to 16 columns. */
struct ckdist_training_pack {
  int32_t turned, count, parameter[4];
};

struct ckdist_training_program {
  const struct ckdist_training_step* steps; /* loss and gradients */
  const struct ckdist_training_step* loss_steps;
  int32_t step_count, loss_step_count;
  const struct ckdist_training_value* values;
  int32_t value_count;
  const struct ckdist_training_parameter* parameters;
  int32_t parameter_count;
  const struct ckdist_training_pack* packs;
  int32_t pack_count;
  int64_t arena_bytes, max_tokens, vocab;
  int64_t trained_floats; /* of the parameters' arena: those that change, packed by each step that multiplies with them.
                             What lies behind them is packed once, where no trained matrix is packed beside it, and
                             then, but for vectors and the embeddings, not read again */
  int32_t heads, kv_heads, head_dim;
  int32_t bf16;                /* what products read is bfloat16, else float32 */
  struct ckdist_rope ropes[4]; /* of max_tokens positions */
  const float* parameter_arena;
  float* gradient_arena;
};

struct ckdist_training_batch {
  const int32_t* token_ids;
  const int32_t* targets;
  const int32_t* starts; /* (sequences + 1,) */
  int64_t tokens, sequences;
};

struct ckdist_training;
/* communicator: of the ranks that cut the batch, or null. cpus: one per thread, or null. What the program names must
 * outlive it. */
CKDIST_EXPORT int ckdist_training_new(const struct ckdist_training_program* program,
                                      struct ckdist_communicator* communicator, int32_t threads, const int32_t* cpus,
                                      int32_t spins, struct ckdist_training** out);
CKDIST_EXPORT void ckdist_training_free(struct ckdist_training* training);
/* The sum of the losses; with `backward` also gradients, all-reduced with `reduce`. `clear`: what the gradients held
 * does not count. */
CKDIST_EXPORT int ckdist_training_run(struct ckdist_training* training, const struct ckdist_training_batch* batch,
                                      int32_t backward, int32_t clear, int32_t reduce, double* loss);
/* Seconds of the last run by op, and in the last place those of packing; of the first thread. (19,) */
CKDIST_EXPORT void ckdist_training_times(struct ckdist_training* training, double* out);
/* Bytes of activations, of workspace, and of matrices that are packed for good. (3,) */
CKDIST_EXPORT void ckdist_training_bytes(struct ckdist_training* training, int64_t* out);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
