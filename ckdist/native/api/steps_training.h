#ifndef CKDIST_API_STEPS_TRAINING_H
#define CKDIST_API_STEPS_TRAINING_H
#include "api/steps_inference.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Steps of training: a number and a struct for each kind. They read and write activations and floats alike, but for
   products: what they multiply are activations. A gradient is added to what its parameter's place holds; one that is
   `fresh` has nothing there yet. */

enum ckdist_training_step_kind {
  ckdist_step_lookup = ckdist_inference_step_kinds,
  ckdist_step_convert,
  ckdist_step_scale,
  ckdist_step_add,
  ckdist_step_rms_norm,
  ckdist_step_rms_norm_grad,
  ckdist_step_matmul,
  ckdist_step_matmul_grad,
  ckdist_step_weight_grad,
  ckdist_step_bias_grad,
  ckdist_step_rope,
  ckdist_step_attend_packed,
  ckdist_step_attend_grad,
  ckdist_step_gated,
  ckdist_step_gated_grad,
  ckdist_step_cross_entropy,
  ckdist_step_embed_grad,
  ckdist_step_reduce_gradients,
  ckdist_step_all_reduce,
  ckdist_step_route,
  ckdist_step_route_grad,
  ckdist_step_grouped_experts,
  ckdist_step_grouped_experts_grad,
  ckdist_step_switched,
  ckdist_step_switched_grad,
  ckdist_step_latent_keys,
  ckdist_step_latent_keys_grad,
  ckdist_step_latent_keys_weight_grad,
  ckdist_step_tally,
  ckdist_step_tally_grad,
  ckdist_step_balance_loss,
  ckdist_step_recv_rows,
  ckdist_step_send_rows,
  ckdist_step_kinds /* of both */
};

/* out = rows of a parameter, which has those of the vocabulary from first_row on; zeros for other ids */
struct ckdist_lookup_step {
  struct ckdist_step step;
  int32_t out, table;
  int64_t first_row;
};

/* out = x: as many elements as both have, and zeros behind them */
struct ckdist_convert_step {
  struct ckdist_step step;
  int32_t x, out;
};

struct ckdist_scale_step {
  struct ckdist_step step;
  int32_t x, out;
  float factor;
};

struct ckdist_add_step {
  struct ckdist_step step;
  int32_t x, y, out;
};

/* Over `size` elements each, of the first `normed` ones; the others are copied. */
struct ckdist_rms_norm_step {
  struct ckdist_step step;
  int32_t x, out, weight;
  int64_t size, normed;
  float eps;
};

/* dx = the gradient (+ residual) */
struct ckdist_rms_norm_grad_step {
  struct ckdist_step step;
  int32_t x, dy, residual, dx, weight, weight_grad;
  int64_t size, normed;
  float eps;
};

/* out = x times a pack + bias (+ residual) */
struct ckdist_matmul {
  int32_t pack, out, bias, residual;
};
struct ckdist_matmul_step {
  struct ckdist_step step;
  int32_t x, count;
  const struct ckdist_matmul* products; /* at most 4 */
};

/* dx = dy, which lie side by side, times a pack. */
struct ckdist_matmul_grad_step {
  struct ckdist_step step;
  int32_t count;
  const int32_t* dy;
  int32_t pack, dx;
};

/* gradient += dy transposed times x */
struct ckdist_gradient {
  int32_t dy, gradient, fresh;
};
struct ckdist_weight_grad_step {
  struct ckdist_step step;
  int32_t x, count;
  const struct ckdist_gradient* gradients; /* at most 4 */
};

/* gradient += the sum over the tokens of dy */
struct ckdist_bias_grad_step {
  struct ckdist_step step;
  int32_t count;
  const struct ckdist_gradient* gradients;
};

/* Of heads of `width` elements, of which those from `first` on are rotated. */
struct ckdist_rope_step {
  struct ckdist_step step;
  int32_t x, out, table, back, width, first;
};

/* Within packed sequences; also the log of the sum of exp(score), (tokens, heads). sinks: a parameter, a score of each
   head that has no value. */
struct ckdist_attend_packed_step {
  struct ckdist_step step;
  int32_t q, k, v, sinks, out, log_sum_exp, window;
  float scale, soft_cap;
};
struct ckdist_attend_grad_step {
  struct ckdist_step step;
  int32_t q, k, v, out, log_sum_exp, d_out, dq, dk, dv, window;
  int32_t sinks, sinks_gradient; /* where sinks are trained */
  float scale, soft_cap;
};

struct ckdist_gated_step {
  struct ckdist_step step;
  int32_t gate, up, out, function; /* enum ckdist_gate */
};
struct ckdist_gated_grad_step {
  struct ckdist_step step;
  int32_t gate, up, dy, d_gate, d_up, function;
};

/* The loss of x times the pack `head`, which has the vocabulary from first_row on; dx by the pack `head_transposed`;
   the gradient of the head. */
struct ckdist_cross_entropy_step {
  struct ckdist_step step;
  int32_t x, dx, head, head_transposed, gradient, fresh;
  float soft_cap;
  int64_t first_row;
};

/* gradient += rows of dy; it has those of the vocabulary from first_row on */
struct ckdist_embed_grad_step {
  struct ckdist_step step;
  int32_t dy, gradient;
  int64_t first_row;
};

/* Begins the all_reduce of the gradients' floats [begin, end) over the replicas; first, where they are partial over it,
   over the tensor-parallel ranks. */
struct ckdist_reduce_gradients_step {
  struct ckdist_step step;
  int64_t begin, end;
  int32_t tensor;
};

/* The sum of x over the tensor-parallel ranks, in place; floats. */
struct ckdist_all_reduce_step {
  struct ckdist_step step;
  int32_t x;
};

/* chosen = the experts of each token, int32 where others have floats; shares = theirs. */
struct ckdist_route_step {
  struct ckdist_step step;
  int32_t logits, correction, chosen, shares; /* correction: a parameter */
  struct ckdist_routing routing;
};
struct ckdist_route_grad_step {
  struct ckdist_step step;
  int32_t logits, chosen, d_shares, d_logits;
  struct ckdist_routing routing;
};

/* Stacks A and B of LoRA on gate, up or down, parameters, or -1; low: the scale times what A makes of each row. */
struct ckdist_expert_low {
  int32_t a, b, low;
};
/* The same with their gradients: of what A makes before its scale, and of the parameters; shared, of down alone: low
   times the row's share. */
struct ckdist_expert_low_grad {
  int32_t a, b, low, d_low, shared, a_gradient, b_gradient;
};

/* out = the sum of what its experts make of each token, times their shares. The weights are stacks of so many experts,
   the biases theirs or -1, of which this rank's columns begin with bias_column; gate, up and joined have `used` rows of
   each token, an expert's behind those of the one before it. */
struct ckdist_grouped_experts_step {
  struct ckdist_step step;
  int32_t x, chosen, shares, out, gate, up, joined;
  int32_t gate_weight, up_weight, down_weight, experts;
  int32_t gate_bias, up_bias, down_bias;
  int64_t bias_column;
  struct ckdist_expert_low low[3];
  float scale;
  int32_t function; /* enum ckdist_gate */
};
struct ckdist_grouped_experts_grad_step {
  struct ckdist_step step;
  int32_t x, chosen, shares, gate, up, dy, dx, d_shares, d_gate, d_up, joined;
  int32_t gate_weight, up_weight, down_weight, experts;
  int32_t gate_bias, up_bias, down_bias;
  int64_t bias_column;
  struct ckdist_expert_low_grad low[3];
  float scale;
  int32_t function; /* enum ckdist_gate */
  int32_t gate_gradient, up_gradient, down_gradient;
  int32_t gate_bias_gradient, up_bias_gradient, down_bias_gradient;
  int32_t fresh; /* all of them */
};

/* out = x times the sigmoid of `by`, one number of each token */
struct ckdist_switched_step {
  struct ckdist_step step;
  int32_t x, by, out;
};
struct ckdist_switched_grad_step {
  struct ckdist_step step;
  int32_t x, by, dy, dx, d_by;
};

/* Of each head out = the first `rank` elements of x times its matrix, (rank, columns), and behind that the others of x;
   the gradients of x and of the matrices. */
struct ckdist_latent_keys_step {
  struct ckdist_step step;
  int32_t x, out, weight;
  int64_t rank;
};
struct ckdist_latent_keys_grad_step {
  struct ckdist_step step;
  int32_t dy, dx, weight;
  int64_t rank;
};
struct ckdist_latent_keys_weight_grad_step {
  struct ckdist_step step;
  int32_t x, dy, gradient, fresh;
  int64_t rank;
};

/* out = the rows that another stage sends, and behind them a tally, if there is one. shared: the tensor-parallel ranks
   receive some each, and zeros in others' places. */
struct ckdist_recv_rows_step {
  struct ckdist_step step;
  int32_t out, tally, peer, tag, shared; /* peer: a stage */
};

/* Sends another stage the rows of x, and a tally, if there is one; shared: this tensor-parallel rank's rows. */
struct ckdist_send_rows_step {
  struct ckdist_step step;
  int32_t x, tally, peer, tag, shared;
};

/* A tally is of the whole batch: of each expert how often it was taken, and the sum of its scores, over all tokens of
   some layers. out = that of these layers (+ before); the gradients of their logits. */
struct ckdist_tallied {
  int32_t logits, chosen;
};
struct ckdist_tally_step {
  struct ckdist_step step;
  int32_t out, before, count;
  const struct ckdist_tallied* layers;
};
struct ckdist_tallied_grad {
  int32_t logits, d_logits;
};
struct ckdist_tally_grad_step {
  struct ckdist_step step;
  int32_t d_tally, count;
  const struct ckdist_tallied_grad* layers;
};

/* The load-balancing loss of so many layers, times the targets, and its gradient, times the coefficient as well. */
struct ckdist_balance_loss_step {
  struct ckdist_step step;
  int32_t tally, d_tally, layers;
  float coefficient;
};

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
