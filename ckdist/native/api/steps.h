#ifndef CKDIST_API_STEPS_H
#define CKDIST_API_STEPS_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* The steps of lowered programs: a struct for each kind, which begins with struct ckdist_step. Fields that name an
   operand are indices into the program's values, matrices, vectors, parameters or packs, -1 where it is absent. A kind
   is run by its file in runtime/steps. */

enum ckdist_step_kind {
  ckdist_step_embed, /* inference */
  ckdist_step_norm_quantize,
  ckdist_step_linear,
  ckdist_step_attend,
  ckdist_step_gather_rows,
  ckdist_step_sum_squares,
  ckdist_step_delta_rule,
  ckdist_step_experts,
  ckdist_step_linear_heads,
  ckdist_step_attend_latent,
  ckdist_step_output_rows,
  ckdist_step_mean_rows,
  ckdist_step_store_cross,
  ckdist_step_attend_cross,
  ckdist_step_recv,
  ckdist_step_send,
  ckdist_step_lookup, /* training */
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
  ckdist_step_balance_loss,
  ckdist_step_recv_rows,
  ckdist_step_send_rows,
  ckdist_step_kinds
};

/* The rows that a step works on: the batch's tokens, or its tokens whose logits are wanted. Where tokens are sharded a
   rank has its own tokens; of the others it has all, or those among its own tokens. host: of a rank's tokens those that
   its host has, where hosts share them out. */
enum ckdist_rows { ckdist_rows_tokens, ckdist_rows_selected, ckdist_rows_local_selected, ckdist_rows_host };

struct ckdist_step {
  int32_t kind, rows;
};

/* Consecutive operands, each a shard of one. */
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
  ckdist_gate_relu = 6
};
enum ckdist_rope_table { ckdist_rope_none = -1, ckdist_rope_global = 0, ckdist_rope_local = 1 };
enum ckdist_activation_format { ckdist_activation_f32, ckdist_activation_bf16, ckdist_activation_q8 };

/* Where a value lies. */
enum ckdist_place {
  ckdist_place_arena,
  ckdist_place_slot, /* what other ranks read: this rank's summand, or its rows */
  ckdist_place_logits,
  ckdist_place_hidden,      /* selected rows of hidden states, which every rank makes */
  ckdist_place_activations, /* rows as products read them */
  ckdist_place_tokens,      /* all tokens' rows, each in the slot of the rank that has the token */
  ckdist_place_columns,     /* local tokens' rows, of which each rank's columns are in its slot */
  ckdist_place_outputs,     /* all selected rows, each in the slot of the rank that has its token */
  ckdist_place_sums         /* partial over hosts: all tokens' rows, of which each rank of a host writes its own */
};

struct ckdist_value {
  int32_t place;    /* enum ckdist_place */
  int32_t format;   /* enum ckdist_activation_format, of activations */
  int32_t selected; /* it has selected rows alone; else a step of selected rows finds them at their tokens */
  int32_t sum;      /* a value that gets the sums over the hosts, of the rows that this host has; or -1 */
  int64_t width;    /* floats from row to row; activations: columns of the matrices that read them */
  int64_t offset;   /* arena: bytes; slot and what is read there: its index; logits: the first column */
  int64_t lead;     /* columns before the value's own */
  int64_t floats;   /* activations: columns of their own */
  int64_t room;     /* training: elements that a row has place for, zeros behind the width */
  int64_t stride;   /* training: bytes from row to row */
  int64_t kept;     /* training: whether it lies in what is kept of a batch between two passes */
};

/* Which row of a table a token has. type: the first, but the second where the token is of a second text */
enum ckdist_embed_by { ckdist_embed_by_id, ckdist_embed_by_position, ckdist_embed_by_type };

/* out = scale * rows of the table's shards; zeros for ids of another rank's part of the vocabulary. by: enum
   ckdist_embed_by; added: the row of this matrix that has the token's type is added; -1: none. waves: in
   place of rows the sines and then the cosines of the token's angles, by enum ckdist_rope_table */
struct ckdist_embed_step {
  struct ckdist_step step;
  int32_t out, by, added, waves;
  struct ckdist_span table; /* matrices */
  int64_t first_row;        /* of the vocabulary, that the first shard has */
  float scale;
};

/* r = x + post_factor * rms_norm(sum of y's summands), without what is absent; sum = r; activations = factor *
   norm(r), as products read them. norm: rms_norm, or with `centred` the layer norm, plus norm_bias. normed = norm(r) in
   floats. activations: values by format, as many as shards of the columns, each of which takes the next floats. gate: a
   value; y is multiplied by its sigmoid, and nothing but y is there. */
struct ckdist_norm_quantize_step {
  struct ckdist_step step;
  int32_t x, y, gate;
  int32_t post_norm, norm, norm_bias; /* vectors */
  float post_eps, eps, post_factor, factor;
  int32_t centred;
  int32_t sum, normed;
  struct ckdist_span activations[3];
  int32_t gather, gather_sum; /* of rows that hosts share out: every host gets all activations; the sum as well */
};

/* out = factor * norm(r) of the selected rows, both as of norm_quantize. */
struct ckdist_output_rows_step {
  struct ckdist_step step;
  int32_t x, y;
  int32_t post_norm, norm, norm_bias; /* vectors */
  float post_eps, eps, post_factor, factor;
  int32_t centred, out;
};

/* out = for each selected row the mean of its sequence's selected rows, which are as those of output_rows. */
struct ckdist_mean_rows_step {
  struct ckdist_step step;
  int32_t x, y;
  int32_t post_norm, norm, norm_bias; /* vectors */
  float post_eps, eps, post_factor, factor;
  int32_t centred, out;
};

/* One matrix of a linear step: out = x times weight + bias (+ low times low_weight). */
struct ckdist_product {
  struct ckdist_span x;          /* activations: one, or one for each shard of the columns */
  int32_t out;                   /* value */
  struct ckdist_span weight;     /* matrices: shards of the rows, whose results stand side by side, or of the columns */
  int32_t bias;                  /* the first of a vector for each shard of the rows */
  struct ckdist_span low;        /* values: what low-rank matrices A made of x, as x; a count of 0: nothing is added */
  struct ckdist_span low_weight; /* matrices B: as the shards of the rows */
};

/* All products of one input. */
struct ckdist_linear_step {
  struct ckdist_step step;
  int32_t count;
  const struct ckdist_product* products;
  int32_t summed;     /* the shards are of the columns, and their products are added in their order */
  int32_t gate;       /* enum ckdist_gate: of two products, the first's out = gate(it) * the second's */
  int32_t activation; /* enum ckdist_gate, of each element of the results */
  float soft_cap;     /* on the results; 0: none */
};

/* Norms and rotates q and k, stores k and v in the cache, out = attention. */
struct ckdist_attend_step {
  struct ckdist_step step;
  int32_t q, k, v, out;
  int32_t rotated;        /* where rotated queries go; -1: they stay in q */
  int32_t q_norm, k_norm; /* vectors of a head's width, or where there are squares of all local heads */
  int32_t squares;        /* value: of sum_squares, where all heads of a token are normed together */
  int32_t sinks;          /* vector of local heads: a score of each that has no value */
  int32_t layer, rope_table, window;
  int32_t bidirectional; /* a token sees all of its sequence, whose tokens are all in the batch */
  float eps, scale, soft_cap;
  /* Biases of scores: a vector (buckets, heads of all ranks), and the bucket of each distance from -reach to reach of a
     key's position less the query's; relative -1: none. */
  int32_t relative, reach;
  const int32_t* buckets;
};

/* Stores keys and values of all tokens in a layer's cache. */
struct ckdist_store_cross_step {
  struct ckdist_step step;
  int32_t k, v, layer;
};

/* out = attention to the keys and values that store_cross has left: as many as the batch's first text has tokens. */
struct ckdist_attend_cross_step {
  struct ckdist_step step;
  int32_t q, out, layer;
  float scale;
};

/* out, row i = x + post_factor * rms_norm(sum of y) of the i-th selected token, by the rank that has it. */
struct ckdist_gather_rows_step {
  struct ckdist_step step;
  int32_t x, y, post_norm, out;
  float post_eps, post_factor;
};

/* out = the sums of squares of each head of q and then of k, 0 of heads that are not local or that another rank
   counts. */
struct ckdist_sum_squares_step {
  struct ckdist_step step;
  int32_t q, k, out, layer;
};

/* Linear attention of local value heads: SiLU of short convolutions of q, k and v; q and k divided by their lengths, q
   times scale; the states' updates; out = rms_norm(what q reads of them) * silu(z). Weights are vectors. */
struct ckdist_delta_rule_step {
  struct ckdist_step step;
  int32_t q, k, v, z, b, a, out;
  int32_t conv_q, conv_k, conv_v, a_log, dt_bias, norm;
  int32_t layer;
  int32_t exchanged; /* rows of q to a are in the slots of their tokens' ranks */
  float eps, l2_eps, scale;
};

enum ckdist_scores { ckdist_scores_softmax, ckdist_scores_sigmoid };

/* How experts are chosen: Routing in program/routing.py. */
struct ckdist_routing {
  int32_t used, scores; /* enum ckdist_scores */
  int32_t renormalise, groups, top_groups, group_scores;
  float scale;
};

/* Matrices of LoRA, stacks where the other is one: what x times a is, times b, is added to x times the other. Of gate
   and up b has their shards, of down a; spans of a count of 0: there are none. */
struct ckdist_low_rank {
  struct ckdist_span a, b;
};

/* Experts of one shape: stacks of matrices, of which a shard of the intermediate size has a part of each. */
struct ckdist_expert_set {
  int32_t first, count;           /* experts that are here; 0 and 1 of a set that all tokens take */
  int32_t gate_x, up_x;           /* activations */
  struct ckdist_span gate, up;    /* matrices: shards of the rows */
  struct ckdist_span down;        /* matrices: shards of the columns, whose products are added in their order */
  int32_t joined;                 /* value: gate * up, shard beside shard; the rows of an expert follow one another */
  struct ckdist_span activations; /* the same for each shard, as down reads it */
  /* Vectors, of each expert that is here `bias_width` floats, of which the shards' begin with bias_column, and
     as many as `out` is wide. The shard `biased` adds that of down to its products. */
  int32_t gate_bias, up_bias, down_bias;
  int32_t biased;
  int64_t bias_width, bias_column;
  int32_t low_x; /* activations that a of gate and up read; -1: there are none */
  struct ckdist_low_rank gate_low, up_low, down_low;
  struct ckdist_span low_activations; /* `joined` for each shard, as a of down reads it */
  int32_t low;                        /* value: what these make of it, shard beside shard */
};

/* Chooses experts by logits, out = the sum of what they make of each token. */
struct ckdist_experts_step {
  struct ckdist_step step;
  int32_t logits, switches; /* switches: of the set that all tokens take; -1: its share is 1 */
  int32_t correction;       /* vector */
  struct ckdist_routing routing;
  int32_t gate; /* enum ckdist_gate */
  int32_t count;
  const struct ckdist_expert_set* sets; /* the chosen, and then those that all tokens take */
  const int32_t* host_experts;          /* (hosts + 1,) the first expert of each, where hosts share rows out */
  int32_t layer;                        /* whose rows by expert are counted */
  int32_t out;
};

/* out = of each head of x, x_width floats, the first `columns` times the head's matrix of head_rows rows, and the
   others behind that. */
struct ckdist_linear_heads_step {
  struct ckdist_step step;
  int32_t x, out;
  struct ckdist_span weight; /* matrices: one for each local head */
  int32_t format;            /* enum ckdist_activation_format, that they read */
  int64_t x_width, columns, head_rows;
};

/* Norms and rotates k, stores it in the cache, rotates q in its place, out = attention. A head of q and k are a latent
   vector and what is rotated; norm: of the latent vector. */
struct ckdist_attend_latent_step {
  struct ckdist_step step;
  int32_t q, k, out;
  int32_t norm; /* vector */
  int32_t layer, rope_table;
  float eps, scale;
};

/* out = the rows of all tokens that the previous stage sends; where the ranks of a stage share tokens, this rank's. A
   summand (`place` slot) has zeros in the rows that other ranks of the stage receive. */
struct ckdist_recv_step {
  struct ckdist_step step;
  int32_t out;
};

/* Sends the next stage this rank's rows of x + post_factor * rms_norm(sum of y). The last step of a stage. */
struct ckdist_send_step {
  struct ckdist_step step;
  int32_t x, y, post_norm;
  float post_eps, post_factor;
};

/* Of training. Steps read and write activations and floats alike, but for products: what they multiply are activations.
   A gradient is added to what its parameter's place holds; one that is `fresh` has nothing there yet. */

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

/* out = the rows that another stage sends. shared: the tensor-parallel ranks receive some each, and zeros in others'
   places. */
struct ckdist_recv_rows_step {
  struct ckdist_step step;
  int32_t out, peer, tag, shared; /* peer: a stage */
};

/* Sends another stage the rows of x; shared: this tensor-parallel rank's. */
struct ckdist_send_rows_step {
  struct ckdist_step step;
  int32_t x, peer, tag, shared;
};

/* The load-balancing loss of all layers, and its gradient by their logits, times the coefficient and the targets. */
struct ckdist_balanced {
  int32_t logits, chosen, d_logits;
};
struct ckdist_balance_loss_step {
  struct ckdist_step step;
  int32_t count;
  const struct ckdist_balanced* layers;
  float coefficient;
};

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
