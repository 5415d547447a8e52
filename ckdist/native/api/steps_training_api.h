#pragma once
#include "api/steps_inference_api.h"

/* Steps of training: a number and a struct for each kind. They read and write activations and floats, except
   products, which read only activations. A gradient is added to its parameter's gradient buffer; if `fresh` is set,
   the buffer holds nothing yet. */

enum ckdist_training_step_kind {
  ckdist_step_lookup = ckdist_inference_step_kinds,
  ckdist_step_convert,
  ckdist_step_scale,
  ckdist_step_scale_queries,
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
  ckdist_step_dropout,
  ckdist_step_row_norms,
  ckdist_step_magnitude,
  ckdist_step_recv_rows,
  ckdist_step_send_rows,
  ckdist_step_place_parameters,
  ckdist_step_convolve,
  ckdist_step_convolve_grad,
  ckdist_step_delta_packed,
  ckdist_step_delta_grad,
  ckdist_step_kinds /* of both */
};

/* out = rows of a parameter, which has the vocabulary from first_row on; zeros for other ids. */
struct ckdist_lookup_step {
  struct ckdist_step step;
  int32_t out, table;
  int64_t first_row;
};

/* out = x: the elements that both have, then zeros. */
struct ckdist_convert_step {
  struct ckdist_step step;
  int32_t x, out;
};

struct ckdist_scale_step {
  struct ckdist_step step;
  int32_t x, out;
  float factor;
};

/* out = x, scaled by the position of the row's token as attend scales queries. */
struct ckdist_scale_queries_step {
  struct ckdist_step step;
  int32_t x, out;
  float query_beta;
  int32_t query_context, query_from_one;
};

struct ckdist_add_step {
  struct ckdist_step step;
  int32_t x, y, out;
};

/* Over groups of `size` elements of the first `normed` ones; the others are copied. The weight is for `groups` of
   them, and for the next ones again. */
struct ckdist_rms_norm_step {
  struct ckdist_step step;
  int32_t x, out, weight, groups;
  int64_t size, normed;
  float eps;
};

/* dx = the gradient (+ residual) */
struct ckdist_rms_norm_grad_step {
  struct ckdist_step step;
  int32_t x, dy, residual, dx, weight, weight_grad, groups;
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

/* dx = (the dy side by side) times a pack. */
struct ckdist_matmul_grad_step {
  struct ckdist_step step;
  int32_t count;
  const int32_t* dy;
  int32_t pack, dx;
};

/* gradient += dy^T x. */
struct ckdist_gradient {
  int32_t dy, gradient, fresh;
};
struct ckdist_weight_grad_step {
  struct ckdist_step step;
  int32_t x, count;
  const struct ckdist_gradient* gradients; /* at most 4 */
};

/* gradient += sum over the tokens of dy. */
struct ckdist_bias_grad_step {
  struct ckdist_step step;
  int32_t count;
  const struct ckdist_gradient* gradients;
};

/* For heads of `width` elements; those from `first` on are rotated. back: by the negative angle. */
struct ckdist_rope_step {
  struct ckdist_step step;
  int32_t x, out, table, back, width, first;
};

/* Attention within packed sequences. log_sum_exp: log of the sum of exp(score), (tokens, heads). sinks: a parameter,
   for each head a score without a value. */
struct ckdist_attend_packed_step {
  struct ckdist_step step;
  int32_t q, k, v, sinks, out, log_sum_exp, window;
  float scale, soft_cap;
};
struct ckdist_attend_grad_step {
  struct ckdist_step step;
  int32_t q, k, v, out, log_sum_exp, d_out, dq, dk, dv, window;
  int32_t sinks, sinks_gradient; /* if sinks are trained */
  float scale, soft_cap;
};

/* A gate is for an element of up, or for a whole head. */
struct ckdist_gated_step {
  struct ckdist_step step;
  int32_t gate, up, out, function; /* enum ckdist_gate */
};
struct ckdist_gated_grad_step {
  struct ckdist_step step;
  int32_t gate, up, dy, d_gate, d_up, function;
};

/* The loss of x times the pack `head`, which has the vocabulary from first_row on; dx with the pack
   `head_transposed`; and the gradient of the head. The loss is target_weight * cross-entropy + teacher_weight *
   divergence from a teacher, of whom `choices` tokens are known. */
struct ckdist_cross_entropy_step {
  struct ckdist_step step;
  int32_t x, dx, head, head_transposed, gradient, fresh;
  float soft_cap, target_weight, teacher_weight;
  int64_t first_row, choices;
};

/* gradient += rows of dy. The gradient has the vocabulary from first_row on. */
struct ckdist_embed_grad_step {
  struct ckdist_step step;
  int32_t dy, gradient;
  int64_t first_row;
};

/* Starts the all_reduce of the gradients' floats [begin, end) over the replicas. tensor: first over the
   tensor-parallel ranks, because the gradients are partial. kept: ZeRO does not free their pages. */
struct ckdist_reduce_gradients_step {
  struct ckdist_step step;
  int64_t begin, end;
  int32_t tensor, kept;
};

/* Sums x over the tensor-parallel ranks, in place; floats. */
struct ckdist_all_reduce_step {
  struct ckdist_step step;
  int32_t x;
};

/* chosen = the experts of each token (int32 instead of floats); shares = their shares. */
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

/* LoRA of gate, up or down. a, b: parameters (stacks), or -1. low: scale * x A^T for each row. */
struct ckdist_expert_low {
  int32_t a, b, low;
};
/* The same with gradients. d_low: the gradient of x A^T, before the scale. shared: low * the row's share, only for
   down. */
struct ckdist_expert_low_grad {
  int32_t a, b, low, d_low, shared, a_gradient, b_gradient;
};

/* out = sum over a token's experts of share * expert(token). The weights are stacks of `experts` matrices. Biases
   are stacks or -1; this rank's columns of them begin with bias_column. gate, up and joined have `used` rows for
   each token, grouped by expert. */
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
  int32_t fresh; /* of all gradients */
};

/* out = x * sigmoid(by), where `by` has one number for each token. */
struct ckdist_switched_step {
  struct ckdist_step step;
  int32_t x, by, out;
};
struct ckdist_switched_grad_step {
  struct ckdist_step step;
  int32_t x, by, dy, dx, d_by;
};

/* For each head: out = (the first `rank` elements of x times its matrix (rank, columns), the other elements of x);
   and the gradients of x and of the matrices. */
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

/* out = the rows that another stage sends, followed by a tally if there is one. shared: each tensor-parallel rank
   receives a part of the rows; the others are zero. */
struct ckdist_recv_rows_step {
  struct ckdist_step step;
  int32_t out, tally, peer, tag, shared; /* peer: a stage */
};

/* Sends the rows of x, and a tally if there is one, to another stage. shared: only this tensor-parallel rank's part
   of the rows. */
struct ckdist_send_rows_step {
  struct ckdist_step step;
  int32_t x, tally, peer, tag, shared;
};

/* A tally, (2, experts), of the whole batch: how often each expert was chosen, and the sums of its scores, over all
   tokens of some layers. out = the tally of these layers (+ before). The gradient step computes the gradients of
   their logits. */
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

/* The load-balancing loss over `layers` layers * number of targets. d_tally = its gradient * coefficient. */
struct ckdist_balance_loss_step {
  struct ckdist_step step;
  int32_t tally, d_tally, layers;
  float coefficient;
};

/* out = factor * x where a hash of the token's key, the stream and the column is at least `least`, else 0. x without
   keys of tokens. */
struct ckdist_dropout_step {
  struct ckdist_step step;
  int32_t x, out;
  uint32_t stream, least;
  float factor;
  int64_t first_column;
};

/* out = norms of the rows of weight + scale * b a, for the whole batch. summed: the columns are sharded over the
   tensor-parallel ranks. */
struct ckdist_row_norms_step {
  struct ckdist_step step;
  int32_t weight, a, b, out; /* parameters, and a value */
  float scale;
  int32_t summed;
};

/* out = x (* by) (* magnitude) / norms (+ bias). Weights are vectors; -1: absent. */
struct ckdist_magnitude_step {
  struct ckdist_step step;
  int32_t x, by, norms, magnitude, bias, out;
};

/* ZeRO with sharded parameters: frees the pages of `freed`, starts to gather `gathered`, and waits until the first
   `awaited` ranges that this run has gathered are complete. Both are ranges [begin, end) of floats. */
struct ckdist_place_parameters_step {
  struct ckdist_step step;
  const int64_t *freed, *gathered; /* (count, 2) */
  int32_t freed_count, gathered_count, awaited;
};

/* out = f(bias + sum over i of weight[:, i] * x[t - taps + 1 + i]) within a sequence; f: SiLU if it activates. weight,
   bias: parameters, (channels, taps) and (channels,); -1: no bias. */
struct ckdist_convolve_step {
  struct ckdist_step step;
  int32_t x, out, weight, bias, taps, activates;
};
struct ckdist_convolve_grad_step {
  struct ckdist_step step;
  int32_t x, dy, dx, weight, bias, taps, activates;
  int32_t weight_gradient, bias_gradient; /* -1: not wanted */
};

/* The states of heads, as in the inference step delta_rule, for packed sequences that begin with zeros. Queries and
   keys are normed if it corrects. key_heads: those of this rank; value head h reads key head h % key_heads if tiled,
   else h / (value heads / key_heads). a_log, dt_bias, skip: parameters; -1: no skip. */
struct ckdist_delta_packed_step {
  struct ckdist_step step;
  int32_t q, k, v, a, b, out; /* b: -1 if it does not correct */
  int32_t a_log, dt_bias, skip;
  int32_t key_heads, value_heads, tiled, by_row, corrects;
  float l2_eps, scale, beta_scale, decay_floor, dt_low, dt_high;
};
/* Its gradients. d_rate, d_skip: those of a_log and of skip, a number for each token and head. */
struct ckdist_delta_grad_step {
  struct ckdist_step step;
  int32_t q, k, v, a, b, d_out, dq, dk, dv, da, db, d_rate, d_skip;
  int32_t a_log, dt_bias, skip;
  int32_t key_heads, value_heads, tiled, by_row, corrects;
  float l2_eps, scale, beta_scale, decay_floor, dt_low, dt_high;
};
