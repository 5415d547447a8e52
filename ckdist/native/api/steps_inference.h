#ifndef CKDIST_API_STEPS_INFERENCE_H
#define CKDIST_API_STEPS_INFERENCE_H
#include "api/steps.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Steps of inference: a number and a struct for each kind. */

enum ckdist_inference_step_kind {
  ckdist_step_embed,
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
  ckdist_inference_step_kinds
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

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
