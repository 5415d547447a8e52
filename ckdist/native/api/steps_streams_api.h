#pragma once
#include "api/steps_api.h"

/* Steps of inference for residual streams and embeddings of n-grams. */

/* Hyper-connections. A row of streams has `streams` parts of one width.
   sum: each stream i = post[i] * y + sum over j of comb[j, i] * (stream j of x), with the old coefficients (post,
   comb). Without x, each stream is y. With w = fn * sum / rms(sum) in parts (pre, post, comb), times its part of
   `scale`, plus `base`: pre = sigmoid + eps, post = 2 * sigmoid, comb = softmax of its rows + eps, whose columns and
   rows are divided by their sums (+ eps) `iterations` times. out = sum over i of pre[i] * (stream i). coefs = (post,
   comb); -1: w has only pre. apart: there is no comb, stream i keeps its x, and post = magnitude * sigmoid + eps. fn
   (parts of w, streams * width), base, scale: vectors. fn -1: out = the mean of streams. */
struct ckdist_mix_streams_step {
  struct ckdist_step step;
  int32_t x, y, old_coefs, sum, coefs, out; /* values */
  int32_t fn, base, scale;                  /* vectors */
  int32_t streams, iterations, apart;
  float eps, norm_eps, magnitude;
};

/* Streams whose parts are read and written by gates. A row has `streams` parts of one width.
   sum: stream i = (stream i of x) + y * 2 * sigmoid(coefs[i]); without coefs y has a row for each stream; without x
   each stream is y; without y it is x, and nothing is written. normed = factor * rms_norm of each stream, with a part
   of `norm` each; -1: none. */
struct ckdist_add_streams_step {
  struct ckdist_step step;
  int32_t x, y, coefs, sum, normed; /* values */
  int32_t norm;                     /* vector */
  int32_t streams;
  float eps, factor;
};

/* out = sum over i of sigmoid(part i of gates) * part i of x. */
struct ckdist_read_streams_step {
  struct ckdist_step step;
  int32_t x, gates, out, streams;
};

/* out: for each of `heads` hashes of the token and those before it, the row of the table, one after another.
   Hash h is of 2 + h / each tokens: (t[0] * m[0]) xor (t[1] * m[1]) ... modulo sizes[h], plus offsets[h], where t[i] is
   i tokens before. A token before the sequence, or up to an earlier `end` token, is `end`.
   table: a matrix, or a stack whose rows follow one another, that stays in its file. */
struct ckdist_ngram_rows_step {
  struct ckdist_step step;
  int32_t out, table, layer;
  int32_t tokens, heads, each, end;
  const int64_t *multipliers, *sizes, *offsets; /* (tokens,), (heads,), (heads,) */
};

/* With s = norm(key of the stream) . norm(stream of x) / sqrt(width) and g = value * sigmoid(sign(s) * sqrt(max(|s|,
   1e-6))), for each stream: sum = x + g, rows = rms_norm(g). A part of each norm is for one stream. */
struct ckdist_gate_streams_step {
  struct ckdist_step step;
  int32_t x, key, value, sum, rows;        /* values */
  int32_t key_norm, query_norm, rows_norm; /* vectors */
  int32_t streams;
  float eps;
};

/* out, this rank's tokens = SiLU(sum over i < taps of conv[:, i] * rows[t - (taps - 1 - i) * dilation]). rows: of all
   tokens. conv: a vector (columns, taps). */
struct ckdist_convolve_streams_step {
  struct ckdist_step step;
  int32_t rows, out, conv, layer, taps, dilation;
};
