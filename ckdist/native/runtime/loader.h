// Reads a rank's shards of weights from model files straight into packed tiles, in parallel threads.
//
// It reads with pread and never maps a file: a file that shrinks meanwhile is an error, not a signal. What is staged per thread
// is a few megabytes, so no weight is held twice.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/segment.h"
#include "core/arena.h"
#include "core/error.h"
#include "kernels/linear.h"
#include "kernels/quantize.h"

namespace ckdist {

class Loader {
 public:
  explicit Loader(const std::vector<std::string>& paths);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // A tensor as it lies in its file.
  struct Source {
    std::string name;
    int file;
    Type type;
    int64_t offset;
    int64_t rows, cols;  // a vector is one column
    int64_t head_rows;   // > 0: the two halves of each head of this many rows are stored interleaved
  };
  struct RowRange {
    int64_t begin, end;
  };

  // The indices by which matrix() and vector() give what was loaded.
  int add_matrix(const Source& source, Type packed_type, const std::vector<RowRange>& rows, int64_t col_begin, int64_t col_end);
  int add_vector(const Source& source, int64_t begin, int64_t end, bool plus_one);

  const uint8_t* arena() const { return data_; }
  // What a shared arena takes: whole huge pages.
  static int64_t shared_bytes(int64_t bytes) { return (std::max<int64_t>(bytes, 1) + Segment::kHugePage - 1) / Segment::kHugePage * Segment::kHugePage; }
  // By which other processes of this host can map the arena, where it is shared; else empty.
  std::string path() const { return segment_ ? segment_->path() : std::string(); }
  int64_t arena_bytes() const { return arena_bytes_; }
  int64_t source_bytes() const { return source_bytes_; }

  // `shared`: the arena can be mapped by other processes.
  void start(int threads, bool shared);
  // True when all is loaded, false when the time passed before; throws what a thread failed with.
  bool wait(int milliseconds);
  int64_t progress() const { return progress_.load(std::memory_order_relaxed); }

  const Matrix& matrix(int index) const;
  const float* vector(int index) const;

 private:
  struct File {
    std::string path;
    int descriptor;
    int64_t size;
  };
  struct MatrixJob {
    Source source;
    std::vector<RowRange> rows;
    int64_t row_bytes;      // of a whole stored row
    int64_t segment_begin;  // of the wanted columns in it, in bytes
    int64_t segment_bytes;
    void (*pack)(const uint8_t* const*, int, int64_t, uint8_t*);
    QuantizeRow quantize;   // null: packed as stored
    int64_t arena_offset;
    Matrix matrix;
  };
  struct VectorJob {
    Source source;
    int64_t begin, end;
    bool plus_one;
    int64_t arena_offset;
    float* data;
  };
  struct Chunk {  // what a thread takes at a time: some tiles of a matrix, or a vector
    bool is_vector;
    int job;
    int64_t tile_begin, tile_end;
  };
  struct Staging;

  void check_source(const Source& source) const;
  int64_t reserve(int64_t bytes);
  void allocate(bool shared);
  void make_huge_pages();
  void plan_chunks();
  void work() noexcept;
  void load(const Chunk& chunk, Staging& staging);
  void load_tiles(const MatrixJob& job, int64_t tile_begin, int64_t tile_end, Staging& staging);
  void load_vector(const VectorJob& job, Staging& staging);
  void read_rows(const MatrixJob& job, Staging& staging) const;
  void read(const Source& source, int64_t offset, int64_t bytes, uint8_t* out) const;
  void join();

  std::vector<File> files_;
  std::vector<MatrixJob> matrices_;
  std::vector<VectorJob> vectors_;
  std::vector<Chunk> chunks_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Segment> segment_;  // instead, where it is shared
  uint8_t* data_ = nullptr;
  int64_t arena_bytes_ = 0;
  int64_t source_bytes_ = 0;

  std::vector<std::thread> threads_;
  std::atomic<size_t> next_chunk_{0};
  std::atomic<int64_t> next_huge_page_{INT64_MAX / 2};  // that shared memory is to get, unless it has them
  std::atomic<int64_t> progress_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable finished_;
  int working_ = 0;               // threads still at work; under mutex_
  std::unique_ptr<Error> error_;  // the first failure; under mutex_
};

}  // namespace ckdist
