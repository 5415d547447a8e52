#pragma once
#include "api/steps_streams_api.h"

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
  ckdist_step_select_positions,
  ckdist_step_adapt,
  ckdist_step_sum_rows,
  ckdist_step_layer_inputs,
  ckdist_step_gated_conv,
  ckdist_step_head_squares,
  ckdist_step_group_norm,
  ckdist_step_altup,
  ckdist_step_match_rms,
  ckdist_step_column_sums,
  ckdist_step_cut_rows,
  ckdist_step_mix_streams,
  ckdist_step_attend_compressed,
  ckdist_step_select_entries,
  ckdist_step_selective_scan,
  ckdist_step_scan_inputs,
  ckdist_step_select_blocks,
  ckdist_step_copy_columns,
  ckdist_step_mix_blocks,
  ckdist_step_add_streams,
  ckdist_step_read_streams,
  ckdist_step_ngram_rows,
  ckdist_step_gate_streams,
  ckdist_step_convolve_streams,
  ckdist_inference_step_kinds
};

/* How a token selects a row of a table. type: row 0, or row 1 for tokens of a second text. place: token t has row t of
   the batch's embeddings, without a table. */
enum ckdist_embed_by { ckdist_embed_by_id, ckdist_embed_by_position, ckdist_embed_by_type, ckdist_embed_by_place };

/* out = scale * rows of the table's shards, or with eps > 0 scale * row / sqrt(mean(row^2) + eps); zeros for ids of
   another rank's part of the vocabulary. by: enum ckdist_embed_by. added: a matrix whose row of the token's type is
   added; -1: none. waves: enum ckdist_rope_table; instead of rows, the sines and then the cosines of the token's
   angles. */
struct ckdist_embed_step {
  struct ckdist_step step;
  int32_t out, by, added, waves;
  struct ckdist_span table; /* matrices */
  int64_t first_row;        /* row of the vocabulary where the first shard begins */
  float scale, eps;
};

/* r = scalar * (x + post_factor * rms_norm(sum of y's summands)); absent operands are skipped. sum = r. activations =
   factor * norm(r), in the formats that products read. normed = norm(r) in floats.
   scalar: a vector of one element.
   norm: rms_norm, or with `centred` the layer norm, plus norm_bias.
   activations: values for each format, one for each shard of the columns; each takes the next floats.
   gate: a value; y is multiplied by gate_function (enum ckdist_gate) of it. Then y is the only other operand. Each
   element of the gate is for gate_width elements of y. */
struct ckdist_norm_quantize_step {
  struct ckdist_step step;
  int32_t x, y, gate, gate_function, gate_width;
  int32_t post_norm, scalar, norm, norm_bias; /* vectors */
  float post_eps, eps, post_factor, factor;
  int32_t centred;
  int32_t sum, normed;
  struct ckdist_span activations[3];
  int32_t gather, gather_sum; /* if rows are sharded over hosts: gather all activations on every host; the sum too */
};

/* out = factor * norm(r) of the selected rows; both as in norm_quantize. */
struct ckdist_output_rows_step {
  struct ckdist_step step;
  int32_t x, y;
  int32_t post_norm, scalar, norm, norm_bias; /* vectors */
  float post_eps, eps, post_factor, factor;
  int32_t centred, out;
};

/* out = for each selected row the mean over its sequence's selected rows, which are computed as in output_rows. */
struct ckdist_mean_rows_step {
  struct ckdist_step step;
  int32_t x, y;
  int32_t post_norm, scalar, norm, norm_bias; /* vectors */
  float post_eps, eps, post_factor, factor;
  int32_t centred, out;
};

/* One matrix of a linear step: out = x * weight^T + bias (+ low * low_weight^T). */
struct ckdist_product {
  struct ckdist_span x;          /* activations: one, or one for each shard of the columns */
  int32_t out;                   /* value */
  struct ckdist_span weight;     /* matrices: shards of the rows, with results side by side, or of the columns */
  int32_t bias;                  /* first of the vectors, one for each shard of the rows */
  struct ckdist_span low;        /* values: products of x with low-rank matrices A, as x; count 0: none */
  struct ckdist_span low_weight; /* matrices B, sharded as the rows; with adapters, these shards for each adapter */
};

/* All products of one input. */
struct ckdist_linear_step {
  struct ckdist_step step;
  int32_t count;
  const struct ckdist_product* products;
  int32_t summed;     /* shards are of the columns; their products are added in order */
  int32_t gate;       /* enum ckdist_gate: with two products, the first out = gate(gate_factor * first) * second */
  int32_t activation; /* enum ckdist_gate, applied to each element of the results */
  float soft_cap;     /* applied to the results; 0: none */
  float gate_factor;
  int32_t adapters; /* A and B are those of each row's adapter, of so many; 0: of all rows */
};

/* out = scale * x * A^T with the A of each row's adapter, and its scale times the row's. Rows without an adapter, or
   whose adapter has no A, are not written. x, out, weight: as in linear; weight has one matrix per adapter. The other
   fields of the products are unused. */
struct ckdist_adapt_step {
  struct ckdist_step step;
  int32_t count;
  const struct ckdist_product* products;
};

/* out = factor * scalar * (x + post_factor * rms_norm(sum of y)). */
struct ckdist_sum_rows_step {
  struct ckdist_step step;
  int32_t x, y, post_norm, scalar, out;
  float post_eps, post_factor, factor;
};

/* Streams of AltUp: c = coefs * tanh(router * rms_norm(v) / width).
   x, out: `count` values, (tokens, width).
   Without y: v = x[0], out[j] = x[j] + sum over i of c[j, i] * x[i].
   With y: v = y, out[j] = x[j] + (1 + c[j]) * (y - x[0]), active = scale * out[0].
   norm, scale, router (count, width), coefs (rows, count): vectors. */
struct ckdist_altup_step {
  struct ckdist_step step;
  int32_t count;
  const int32_t* x;
  struct ckdist_span out;
  int32_t y, active;
  int32_t norm, router, coefs, scale;
  float eps;
};

/* sum = x + sum of y + sum of z. out = the sum of p[i] * v[i] over `count` blocks and the sum itself: p is the softmax
   of proj * norm * v[i] / rms(v[i]). x, z and norm are optional. */
struct ckdist_mix_blocks_step {
  struct ckdist_step step;
  int32_t count;
  const int32_t* blocks;
  int32_t x, y, z, sum, out;
  int32_t norm, proj;
  float eps;
};

/* out[0] = x[0], out[i] = x[i] * rms(x[0]) / rms(x[i]), with mean squares of at least `least`. One out: their mean. */
struct ckdist_match_rms_step {
  struct ckdist_step step;
  int32_t count;
  const int32_t* x;
  struct ckdist_span out;
  float least;
};

/* out, (tokens, blocks of all ranks, 2) = the sum and the sum of squares of each block of columns of x; 0 for blocks of
   other ranks. */
struct ckdist_column_sums_step {
  struct ckdist_step step;
  int32_t x, out, first, block;
};

/* out = max(x - cut, 0), cut = mean + deviations * standard deviation of a row of `columns` columns. sums: the value of
   column_sums. */
struct ckdist_cut_rows_step {
  struct ckdist_step step;
  int32_t x, sums, out, columns;
  float deviations;
};

/* For each layer l: out[l] = (rms_norm(x of the layer * x_factor) + row of the layer * row_factor) * factor, with the
   token's row of the table. Tokens that the table lacks have its first row.
   x: (tokens, layers * width).
   out: values, each (tokens, width).
   table: a matrix that stays in its file. */
struct ckdist_layer_inputs_step {
  struct ckdist_step step;
  int32_t x, norm;
  struct ckdist_span out;
  int32_t table;
  float eps, x_factor, row_factor, factor;
};

/* Normalizes and rotates q and k, stores k and v in the cache, out = attention. Without k and v (-1) it stores nothing:
   the layer's cache is that of an earlier step.
   unit_norms: q and k are divided by the RMS of each head; q_norm and k_norm are absent. value_norm: v is.
   window: as in AttentionTask; negative: chunks. */
struct ckdist_attend_step {
  struct ckdist_step step;
  int32_t q, k, v, out;
  int32_t rotated;        /* value for rotated queries; -1: in place in q */
  int32_t q_norm, k_norm; /* vectors of a head's width; with `squares`, of all local heads */
  int32_t norms_rotated;  /* the norms come after the rotation; without `squares` */
  int32_t squares;        /* value of sum_squares, if one norm covers all heads of a token */
  int32_t sinks;          /* vector of local heads: for each a score without a value */
  int32_t unit_norms, value_norm;
  int32_t layer, rope_table, window;
  int32_t bidirectional; /* a token sees its whole sequence, whose tokens are all in the batch */
  float eps, scale, soft_cap;
  /* Biases of scores: relative is a vector (buckets, heads of all ranks), -1: none. buckets: the bucket of each
     distance (key position - query position) from -reach to reach. */
  int32_t relative, reach;
  const int32_t* buckets;
  int32_t listed;        /* value of select_positions: a token with more positions sees only those; -1: it sees all */
  int32_t listed_block;  /* positions of a block: `listed` is a value of select_blocks; 0: of select_positions */
  int32_t listed_window; /* as in attend_latent */
  /* q at position p is multiplied by 1 + query_beta * log(1 + floor((p + query_from_one) / query_context)); query_beta
     0: by 1 */
  float query_beta;
  int32_t query_context, query_from_one;
};

/* Stores keys and values of all tokens in a layer's cache. */
struct ckdist_store_cross_step {
  struct ckdist_step step;
  int32_t k, v, layer;
};

/* out = attention to the keys and values of store_cross: the tokens of the sequence's first text. */
struct ckdist_attend_cross_step {
  struct ckdist_step step;
  int32_t q, out, layer;
  float scale;
};

/* out, row i = scalar * (x + post_factor * rms_norm(sum of y)) of the i-th selected token; the rank that has the token
   writes it. */
struct ckdist_gather_rows_step {
  struct ckdist_step step;
  int32_t x, y, post_norm, scalar, out;
  float post_eps, post_factor;
};

/* out = the sums of squares of each head of q, then of k. 0 for heads that are not local or that another rank
   counts. */
struct ckdist_sum_squares_step {
  struct ckdist_step step;
  int32_t q, k, out, layer;
};

/* Linear attention of local value heads. Weights are vectors; -1: absent.
   q, k, v: SiLU of their short convolutions, whose inputs are multiplied by q_scale, k_scale and v_scale.
   corrects: the gated delta rule. q and k are divided by their lengths; q is multiplied by scale. beta = beta_scale *
   sigmoid(b).
   Else Mamba-2: beta = softplus(dt_scale * a + dt_bias), from dt_low to dt_high; b is unused.
   The state's factor is exp(-exp(a_log) * softplus(a + dt_bias)), or exp(-exp(a_log) * beta) of Mamba-2. With by_row
   and decay_floor < 0 it is exp(decay_floor * sigmoid(exp(a_log) * (a + dt_bias))). out = rms_norm(q applied to the
   updated state + skip * v) * gate(gate_scale * z). */
struct ckdist_delta_rule_step {
  struct ckdist_step step;
  int32_t q, k, v, z, b, a, out;
  int32_t conv_q, conv_k, conv_v, bias_q, bias_k, bias_v, a_log, dt_bias, skip, norm;
  int32_t layer;
  int32_t exchanged; /* rows of q to a are in the slots of their tokens' ranks */
  int32_t corrects;
  int32_t by_row; /* a and dt_bias have a factor for each row of a state, as many as a key has elements */
  int32_t gate;   /* of enum ckdist_gate */
  float eps, l2_eps, scale, beta_scale, decay_floor;
  float q_scale, k_scale, v_scale, gate_scale, dt_scale, dt_low, dt_high;
};

/* out = c * (short convolution of b * x + bias), without an activation; with b and c -1: SiLU of the convolution of x.
   conv, bias: vectors; -1: no bias. */
struct ckdist_gated_conv_step {
  struct ckdist_step step;
  int32_t b, c, x, out, conv, bias, layer;
  int32_t exchanged; /* as in delta_rule */
};

/* Mamba-1, after the convolution of the same layer: for each channel S = exp(-exp(a_log) d) S + b d x and
   out = (c S + skip * x) * SiLU(z), with d = softplus(dt + dt_bias). bc: b, then c, of all channels. Weights are
   vectors. */
struct ckdist_selective_scan_step {
  struct ckdist_step step;
  int32_t x, z, dt, bc, out;
  int32_t a_log, skip, dt_bias, layer;
};

/* low, bc = the first elements of the sum of x, and the others: b and c of equal widths. With eps > 0 all three are
   normed (RMS), by weights that are vectors unless they are -1. */
struct ckdist_scan_inputs_step {
  struct ckdist_step step;
  int32_t x, low, bc;
  int32_t low_norm, b_norm, c_norm;
  float eps;
};

/* out, (tokens, heads) = the sum of squares of each head of x; 0 for heads of other ranks. */
struct ckdist_head_squares_step {
  struct ckdist_step step;
  int32_t x, out, heads, first_head, head_width;
};

/* out = rms_norm of x over each of `groups` groups of heads. squares: the sums of head_squares; -1: x has all heads.
   parts: x lies in the slots of so many ranks, whose heads end at `ends`, and each rank that has heads has a vector of
   weights from `norm` on; 0: in one place. */
struct ckdist_group_norm_step {
  struct ckdist_step step;
  int32_t x, squares, norm, out, heads, first_head, head_width, groups, parts;
  const int32_t* ends;
  float eps;
};

/* Matrices of LoRA, stacks if the other matrix is a stack: x * a^T * b^T is added to x * matrix^T. For gate and up,
   b is sharded like the matrix; for down, a is. Spans of count 0: no LoRA. */
struct ckdist_low_rank {
  struct ckdist_span a, b;
};

/* Experts of one shape: stacks of matrices. A shard of the intermediate size has a part of each matrix. */
struct ckdist_expert_set {
  int32_t first, count;           /* experts of this rank; 0 and 1 for the set that all tokens use */
  int32_t gate_x, up_x;           /* activations */
  struct ckdist_span gate, up;    /* matrices: shards of the rows */
  struct ckdist_span down;        /* matrices: shards of the columns; their products are added in order */
  int32_t function;               /* enum ckdist_gate */
  int32_t joined;                 /* value: gate * up, shards side by side; rows are grouped by expert */
  struct ckdist_span activations; /* `joined` for each shard, in the format that down reads */
  /* Vectors. Each expert of this rank has `bias_width` floats for gate and up, and the width of `out` for down. The
     shards' part begins at bias_column. The shard `biased` adds down's bias to its products. */
  int32_t gate_bias, up_bias, down_bias;
  int32_t biased;
  int64_t bias_width, bias_column;
  int32_t low_x; /* activations that a of gate and up read; -1: none */
  struct ckdist_low_rank gate_low, up_low, down_low;
  struct ckdist_span low_activations; /* `joined` for each shard, in the format that a of down reads */
  int32_t low;                        /* value: their products with a of down, shards side by side */
};

/* Chooses experts by logits. out = sum over a token's experts of share * expert(token). */
struct ckdist_experts_step {
  struct ckdist_step step;
  int32_t logits, switches; /* switches: gate of the set that all tokens use; -1: its share is 1 */
  int32_t correction;       /* vector */
  int32_t experts_of;       /* vector: the experts of each token id, whole numbers; -1: the best by score */
  int32_t share_factors;    /* vector: a factor of each expert's share; -1: none */
  int32_t shares_input;     /* shares multiply the inputs of the chosen experts in place of their outputs */
  struct ckdist_routing routing;
  int32_t count;
  const struct ckdist_expert_set* sets; /* the chosen experts, then the set that all tokens use */
  const int32_t* host_experts;          /* (hosts + 1,) first expert of each host, if rows are sharded over hosts */
  int32_t layer;                        /* layer for the counters of rows per expert */
  int32_t out;
};

/* For each head of x, of x_width floats: out = (the first `columns` elements times the head's matrix of head_rows
   rows, the other elements). */
struct ckdist_linear_heads_step {
  struct ckdist_step step;
  int32_t x, out;
  struct ckdist_span weight; /* matrices: one for each local head */
  int32_t format;            /* enum ckdist_activation_format that the matrices read */
  int64_t x_width, columns, head_rows;
};

/* Normalizes and rotates k, stores it in the cache, rotates q in place, out = attention. A head of q and k is a
   latent vector followed by the rotated part. norm: for the latent vector. key_norm: for the rotated part. */
struct ckdist_attend_latent_step {
  struct ckdist_step step;
  int32_t q, k, out;
  int32_t norm, key_norm, sinks; /* vectors; sinks as in attend */
  int32_t layer, rope_table, window;
  float eps, scale;
  int32_t listed; /* as in attend */
  /* tokens of a listed window; the last window may be incomplete, as in select_entries. 0: positions are listed */
  int32_t listed_window;
  float query_beta;
  int32_t query_context, query_from_one; /* as in attend */
};

/* Norms (layer norm) and rotates k, from element rope_first on as q, and stores it in the layer's index of keys. For
   each token with more positions than the width of `out`: out = the positions with the largest scores, int32,
   ascending. Of equal scores the lower position is taken. score = sum over heads of weight * max(q . k, 0). Rows of
   other tokens are not written. */
struct ckdist_select_positions_step {
  struct ckdist_step step;
  int32_t q, k, weights, out; /* (tokens, heads, width), (tokens, width), (tokens, heads), (tokens, top_k) */
  int32_t norm, norm_bias;    /* vectors */
  int32_t layer, rope_table, rope_first, heads;
  float eps;
};

/* Norms (RMS) and rotates the queries of each local kv-head and the key that all share, and stores the key in the
   layer's index. For each token whose block of positions is not among the first top_k: out = the top_k blocks with the
   largest scores, int32, ascending; the last `local` blocks up to its own are among them. score = largest q . k of a
   block. */
struct ckdist_select_blocks_step {
  struct ckdist_step step;
  int32_t q, k, out;      /* (tokens, groups, width), (tokens, width), (tokens, groups, top_k) */
  int32_t q_norm, k_norm; /* vectors */
  int32_t layer, rope_table, groups, block, local;
  float eps;
};

/* How windows of `ratio` tokens are compressed to an entry each. A token has a row (keys, gates). With `overlap` both
   have two parts: the first is for the entry of the next window, the second for that of the token's own window.
   entry = rms_norm(sum over rows of softmax(gate + bias) * key), rotated at the window's first position. gates -1: the
   mean of keys. front: the first elements are rotated, not the last.
   kv, gates: values. bias (ratio, width of a row's keys), norm: vectors; norm -1: none. key_norm, key_bias: vectors of
   a layer norm of keys; key_norm -1: none. */
struct ckdist_compression {
  int32_t kv, gates, bias, norm, key_norm, key_bias, ratio, overlap, front;
};

/* Norms each head of q without weights, rotates its last elements, norms and rotates k in the same way with `norm`,
   stores the last keys and rows of the sequence and the entries of complete windows. out = attention of each head to
   the last `window` keys and to the entries, all or those of `listed`; keys are values too. Then the last elements of
   out are rotated back. rotated, keys: rotated queries and keys. sinks: a vector. entries.ratio 0: there are none. */
struct ckdist_attend_compressed_step {
  struct ckdist_step step;
  int32_t q, k, rotated, keys, out, listed;
  int32_t norm, sinks;
  int32_t layer, rope_table, window;
  float eps, scale;
  struct ckdist_compression entries;
};

/* Norms each head of q by q_norm (a vector; -1: none), rotates elements of it and stores the index entries of complete
   windows. For each token with more entries than top_k: out = the entries with the largest scores, as in
   select_positions. With `positions` instead the positions of their windows, then those of the last, incomplete window;
   the rest is the token's own position. weights -1: all are 1. width of `out`: top_k; with `positions` top_k * ratio +
   ratio - 1. */
struct ckdist_select_entries_step {
  struct ckdist_step step;
  int32_t q, weights, out, q_norm;
  int32_t layer, rope_table, heads, positions;
  float eps;
  struct ckdist_compression entries;
};

/* out = the rows that the previous stage sends: all tokens, or this rank's own if the ranks of a stage shard tokens.
   A summand (`place` slot) has zeros in the rows that other ranks of the stage receive. */
struct ckdist_recv_step {
  struct ckdist_step step;
  int32_t out;
};

/* Sends this rank's rows of scalar * (x + post_factor * rms_norm(sum of y)) to the next stage. The last step of a
   stage. */
struct ckdist_send_step {
  struct ckdist_step step;
  int32_t x, y, post_norm, scalar;
  float post_eps, post_factor;
};

/* Copies scalar * (x + post_factor * rms_norm(sum of y)), from column `first` on, to `out` from column `first_out` on:
   as many columns as both have. With a norm `first` is 0. */
struct ckdist_copy_columns_step {
  struct ckdist_step step;
  int32_t x, y, post_norm, scalar, out;
  float post_eps, post_factor;
  int64_t first, first_out;
};
