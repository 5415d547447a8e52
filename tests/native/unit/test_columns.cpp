// The product with some columns of a matrix has the bits of a product with a matrix of these columns alone, for every
// type on every level of this CPU.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/shares.h"

using namespace ckdist;

namespace {

constexpr int64_t kRows = 40, kColumns = 1280, kMostTokens = 33;

// Cache lines, as packed tiles and activations begin.
struct Lines {
  std::vector<uint8_t> room;
  uint8_t* at;
  explicit Lines(int64_t bytes) : room(size_t(bytes + 64)) {
    at = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64;
  }
};

struct Packed {
  Lines tiles;
  Matrix matrix;
};

Packed pack(const LinearKernel& kernel, Type type, const std::vector<std::vector<uint8_t>>& rows, int64_t offset,
            int64_t cols) {
  const int64_t tile_bytes = kernel.tile_bytes(cols);
  Packed packed{Lines((kRows + 15) / 16 * tile_bytes), {}};
  for (int64_t row = 0; row < kRows; row += kTileRows) {
    const uint8_t* sources[kTileRows];
    const int64_t count = std::min<int64_t>(kRows - row, kTileRows);
    for (int64_t i = 0; i < count; ++i) sources[i] = rows[size_t(row + i)].data() + offset;
    kernel.pack(sources, int(count), cols, packed.tiles.at + row / kTileRows * tile_bytes);
  }
  packed.matrix = {type, kRows, cols, tile_bytes, packed.tiles.at};
  return packed;
}

// Rows of activations in a format, one after the other.
Lines prepare(const Kernels& kernels, ActivationFormat format, const std::vector<float>& x, int64_t first,
              int64_t cols) {
  const int64_t stride = ActivationRow::bytes(format, cols);
  Lines rows(kMostTokens * stride);
  for (int64_t t = 0; t < kMostTokens; ++t)
    kernels.elementwise.prepare(format, x.data() + t * kColumns + first, cols, 0, cols, rows.at + t * stride);
  return rows;
}

}  // namespace

TEST_CASE("products with some columns have the bits of a matrix of these columns") {
  std::mt19937 random(37);
  std::vector<float> x(size_t(kMostTokens * kColumns));
  for (float& value : x) value = float(int(random() % 2001) - 1000) / 500;
  for (const Level& level : levels()) {
    if (!level.lacks.empty()) continue;
    const Kernels& kernels = *level.kernels;
    CAPTURE(std::string(kernels.name));
    for (int number = 0; number < kTypeCount; ++number) {
      const LinearKernel& kernel = kernels.linear[number];
      const Type type = Type(number);
      if (!kernel.multiply) continue;
      CAPTURE(std::string(type_traits(type).name));
      const auto row_bytes = [&](int64_t cols) {
        return cols / type_traits(type).block_elements * type_traits(type).block_bytes;
      };
      std::vector<std::vector<uint8_t>> rows(kRows, std::vector<uint8_t>(size_t(row_bytes(kColumns))));
      for (auto& row : rows)
        for (uint8_t& byte : row) byte = uint8_t(random() % 64);  // scales and floats are finite
      const Packed whole = pack(kernel, type, rows, 0, kColumns);
      const Lines all = prepare(kernels, kernel.activation, x, 0, kColumns);
      constexpr int parts = 3;
      for (int part = 0; part < parts; ++part) {
        const Range own = part_columns(kColumns, part, parts);
        const int64_t cols = own.end - own.begin;
        const Packed alone = pack(kernel, type, rows, row_bytes(own.begin), cols);
        const Lines some = prepare(kernels, kernel.activation, x, own.begin, cols);
        Matrix view = whole.matrix;
        view.tiles += kernel.tile_bytes(own.begin);
        view.cols = cols, view.first_column = own.begin, view.row_columns = kColumns;
        for (const int64_t tokens : {1, 2, 7, 33}) {
          CAPTURE(tokens);
          std::vector<float> expected(size_t(tokens * kRows), -1), found = expected;
          kernel.multiply(alone.matrix, 0, 3, some.at, ActivationRow::bytes(kernel.activation, cols), tokens,
                          expected.data(), kRows);
          kernel.multiply(view, 0, 3, all.at, ActivationRow::bytes(kernel.activation, kColumns), tokens, found.data(),
                          kRows);
          CHECK(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0);
          CHECK(std::any_of(found.begin(), found.end(), [](float v) { return v != 0 && v != -1; }));
        }
      }
    }
  }
}
