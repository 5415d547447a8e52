// Adafactor (Shazeer & Stern 2018, arXiv:1804.04235) without momentum: the second moment of a matrix is the product of
// the means of its rows and of its columns. Sums are in double, in an order that depends only on the shape.
#include <cmath>
#include <numeric>

#include "runtime/optimizer_pass.h"

namespace ckdist {
namespace {

constexpr int64_t kRows = 16;           // rows of one item
constexpr int64_t kItemColumns = 1024;  // columns of one item
constexpr double kLeast = 1e-30;        // added to each squared gradient
constexpr double kClip = 1.0;           // most root mean square of an update

}  // namespace

void Optimizer::adafactor(const AdafactorNumbers& k, const MatrixStack& shape, const ckdist_update& update, float* row,
                          float* column) {
  const float* const g = update.gradients;
  const int64_t rows = shape.rows, columns = shape.columns, all = shape.matrices * rows;
  const float kept = float(k.beta), fresh = float(1 - k.beta);
  const double square = k.scale * k.scale;
  std::vector<float> by_row(all, 0.f), by_column(shape.matrices * columns, 0.f);
  each_part(all, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double mean = kernels_.optimizer.sum_squares(g + i * columns, columns) * square / double(columns);
      row[i] = kept * row[i] + fresh * float(mean + kLeast);
    }
  });
  for (int64_t m = 0; m < shape.matrices; ++m) {
    each_part(columns, kItemColumns, [&](int64_t begin, int64_t end) {
      double sums[kItemColumns] = {};
      for (int64_t i = m * rows; i < (m + 1) * rows; ++i)
        for (int64_t j = begin; j < end; ++j)
          sums[j - begin] += double(g[i * columns + j]) * double(g[i * columns + j]);
      for (int64_t j = begin; j < end; ++j) {
        float& own = column[m * columns + j];
        own = kept * own + fresh * float(sums[j - begin] * square / double(rows) + kLeast);
        by_column[size_t(m * columns + j)] = 1 / std::sqrt(own);
      }
    });
    const double mean = std::accumulate(row + m * rows, row + (m + 1) * rows, 0.0) / double(rows);
    for (int64_t i = m * rows; i < (m + 1) * rows; ++i)
      by_row[size_t(i)] = float(k.scale / std::sqrt(double(row[i]) / mean));
  }
  const auto step = [&](int64_t i, int64_t j) {
    return g[i * columns + j] * by_row[size_t(i)] * by_column[size_t(i / rows * columns + j)];
  };
  sums_.assign(size_t(all), 0.0);
  each_part(all, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t j = 0; j < columns; ++j) sums_[size_t(i)] += double(step(i, j)) * double(step(i, j));
  });
  const double size = double(all * columns), root = std::sqrt(std::accumulate(sums_.begin(), sums_.end(), 0.0) / size);
  const float keep = float(k.keep), rate = float(k.rate / std::max(1.0, root / kClip));
  each_part(all, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      parameters(update).each(0, i * columns, columns, [&](float* p, int64_t at, int64_t n) {
        for (int64_t j = 0; j < n; ++j) p[j] = keep * p[j] - rate * step(i, at - i * columns + j);
      });
  });
}

void Optimizer::adafactor(const AdafactorNumbers& k, const ckdist_update& update, float* square) {
  const float* const g = update.gradients;
  const int64_t n = update.n;
  const float kept = float(k.beta), fresh = float(1 - k.beta);
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double gradient = g[i] * k.scale;
    square[i] = kept * square[i] + fresh * float(gradient * gradient + kLeast);
    sum += gradient * gradient / double(square[i]);
  }
  const double rate = k.rate / std::max(1.0, std::sqrt(sum / double(n)) / kClip);
  parameters(update).each(0, 0, n, [&](float* p, int64_t at, int64_t some) {
    for (int64_t i = 0; i < some; ++i)
      p[i] = float(k.keep * p[i] - rate * (g[at + i] * k.scale) / std::sqrt(double(square[at + i])));
  });
}

}  // namespace ckdist
