#include "runtime/loader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstring>

#include "core/numa.h"
#include "kernels/half.h"
#include "kernels/kernels.h"

namespace ckdist {
namespace {

constexpr int64_t kChunkBytes = 2 << 20;   // of stored rows that a thread stages at a time
constexpr int64_t kWorthSkipping = 4096;   // unwanted bytes between two rows' segments that cost more to read than a second call
constexpr int64_t kCacheLine = 64;
constexpr int kMaxThreads = 1024;

bool is_float(Type type) { return type == Type::f32 || type == Type::f16 || type == Type::bf16; }

int64_t bytes_of(Type type, int64_t elements) {
  const TypeTraits& traits = type_traits(type);
  return elements / traits.block_elements * traits.block_bytes;
}

void to_float(Type type, const uint8_t* stored, int64_t n, float* out) {
  if (type == Type::f32) {
    std::memcpy(out, stored, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    uint16_t bits;
    std::memcpy(&bits, stored + 2 * i, sizeof bits);
    out[i] = type == Type::f16 ? float_of_half(bits) : float_of_bf16(bits);
  }
}

// Where the file has row `row` of a tensor whose heads' halves are interleaved.
int64_t stored_row(int64_t row, int64_t head_rows) {
  if (!head_rows) return row;
  const int64_t in_head = row % head_rows, half_rows = head_rows / 2;
  return row - in_head + 2 * (in_head % half_rows) + in_head / half_rows;
}

}  // namespace

// A thread's buffers; they grow to the largest chunk and stay.
struct Loader::Staging {
  std::vector<int64_t> stored_rows;     // of the chunk, in packed order
  std::vector<uint8_t> bytes;           // rows as read
  std::vector<const uint8_t*> row_at;   // each row's segment in `bytes`
  std::vector<float> floats;            // one row, to be quantised
  std::vector<uint8_t> quantized;       // sixteen rows
};

Loader::Loader(const std::vector<std::string>& paths) {
  files_.reserve(paths.size());
  for (const std::string& path : paths) {
    struct stat status;
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor >= 0) files_.push_back({path, descriptor, 0});
    if (descriptor < 0 || fstat(descriptor, &status) != 0) {
      const int reason = errno;
      for (const File& file : files_) close(file.descriptor);
      fail(Status::model_file, "%s cannot be opened: %s", path.c_str(), std::strerror(reason));
    }
    files_.back().size = status.st_size;
    posix_fadvise(descriptor, 0, 0, POSIX_FADV_SEQUENTIAL);
  }
}

Loader::~Loader() {
  stop_ = true;
  join();
  for (const File& file : files_) close(file.descriptor);
}

void Loader::join() {
  for (std::thread& thread : threads_)
    if (thread.joinable()) thread.join();
}

void Loader::check_source(const Source& source) const {
  if (data_) fail(Status::native, "%s was added to a loader that has started", source.name.c_str());
  if (source.file < 0 || source.file >= static_cast<int>(files_.size()))
    fail(Status::native, "%s is in file %d of %zu", source.name.c_str(), source.file, files_.size());
  const TypeTraits& traits = type_traits(source.type);
  if (!traits.block_elements) fail(Status::native, "%s has unknown type %d", source.name.c_str(), static_cast<int>(source.type));
  if (source.rows <= 0 || source.cols <= 0 || source.cols % traits.block_elements)
    fail(Status::native, "%s of type %s cannot have %" PRId64 " rows of %" PRId64, source.name.c_str(), traits.name, source.rows,
         source.cols);
  if (source.head_rows < 0 || source.head_rows % 2 || (source.head_rows && source.rows % source.head_rows))
    fail(Status::native, "%s has %" PRId64 " rows, which heads of %" PRId64 " do not divide", source.name.c_str(), source.rows,
         source.head_rows);
  const File& file = files_[source.file];
  int64_t bytes, end;
  if (source.offset < 0 || __builtin_mul_overflow(source.rows, source.cols / traits.block_elements, &bytes) ||
      __builtin_mul_overflow(bytes, static_cast<int64_t>(traits.block_bytes), &bytes) ||
      __builtin_add_overflow(bytes, source.offset, &end) || end > file.size)
    fail(Status::model_file, "%s: tensor %s does not end within the file's %" PRId64 " bytes: it is truncated or damaged",
         file.path.c_str(), source.name.c_str(), file.size);
}

int64_t Loader::reserve(int64_t bytes) {
  const int64_t offset = arena_bytes_;
  if (bytes > INT64_MAX / 2 - offset) fail(Status::capacity, "the weights need more than %" PRId64 " bytes", INT64_MAX / 2);
  arena_bytes_ = (offset + bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  return offset;
}

int Loader::add_matrix(const Source& source, Type packed_type, const std::vector<RowRange>& ranges, int64_t col_begin, int64_t col_end) {
  check_source(source);
  const char* name = source.name.c_str();
  const TypeTraits& traits = type_traits(packed_type);
  const LinearKernel* kernel = traits.block_elements ? &kernels().linear[static_cast<int>(packed_type)] : nullptr;
  if (!kernel || !kernel->pack)
    fail(Status::native, "%s cannot be packed as type %d: it has no kernel", name, static_cast<int>(packed_type));
  QuantizeRow quantize = nullptr;
  if (packed_type != source.type) {
    quantize = is_float(source.type) ? kernels().quantize.of(packed_type) : nullptr;
    if (!quantize) fail(Status::native, "%s of type %s cannot become %s", name, type_traits(source.type).name, traits.name);
  }
  const int64_t block = std::max(traits.block_elements, type_traits(source.type).block_elements);
  if (col_begin < 0 || col_begin > col_end || col_end > source.cols || col_begin % block || col_end % block)
    fail(Status::native, "columns [%" PRId64 ", %" PRId64 ") of %s are not whole blocks of %" PRId64 " among its %" PRId64, col_begin,
         col_end, name, block, source.cols);
  int64_t rows = 0;
  for (const RowRange& range : ranges) {
    if (range.begin < 0 || range.begin > range.end || range.end > source.rows)
      fail(Status::native, "rows [%" PRId64 ", %" PRId64 ") of %s are not among its %" PRId64, range.begin, range.end, name, source.rows);
    rows += range.end - range.begin;
  }

  MatrixJob job{source,
                ranges,
                bytes_of(source.type, source.cols),
                bytes_of(source.type, col_begin),
                bytes_of(source.type, col_end - col_begin),
                kernel->pack,
                quantize,
                0,
                {packed_type, rows, col_end - col_begin, 0, nullptr}};
  if (rows && job.matrix.cols) job.matrix.tile_bytes = kernel->tile_bytes(job.matrix.cols);
  int64_t packed_bytes;
  if (__builtin_mul_overflow(job.matrix.tile_count(), job.matrix.tile_bytes, &packed_bytes))
    fail(Status::capacity, "%s needs more than %" PRId64 " bytes", name, INT64_MAX);
  job.arena_offset = reserve(packed_bytes);
  source_bytes_ += rows * job.segment_bytes;
  matrices_.push_back(std::move(job));
  return static_cast<int>(matrices_.size()) - 1;
}

int Loader::add_vector(const Source& source, int64_t begin, int64_t end, bool plus_one) {
  check_source(source);
  if (!is_float(source.type) || source.cols != 1)
    fail(Status::native, "vector %s has type %s; it must be F32, F16 or BF16", source.name.c_str(), type_traits(source.type).name);
  if (begin < 0 || begin > end || end > source.rows)
    fail(Status::native, "elements [%" PRId64 ", %" PRId64 ") of %s are not among its %" PRId64, begin, end, source.name.c_str(),
         source.rows);
  source_bytes_ += bytes_of(source.type, end - begin);
  vectors_.push_back({source, begin, end, plus_one, reserve((end - begin) * static_cast<int64_t>(sizeof(float))), nullptr});
  return static_cast<int>(vectors_.size()) - 1;
}

const Matrix& Loader::matrix(int index) const {
  if (index < 0 || index >= static_cast<int>(matrices_.size())) fail(Status::native, "matrix %d of %zu", index, matrices_.size());
  return matrices_[index].matrix;
}

const float* Loader::vector(int index) const {
  if (index < 0 || index >= static_cast<int>(vectors_.size())) fail(Status::native, "vector %d of %zu", index, vectors_.size());
  return vectors_[index].data;
}

// Chunks of whole tiles, in the order in which files hold them.
void Loader::plan_chunks() {
  for (size_t i = 0; i < matrices_.size(); ++i) {
    const MatrixJob& job = matrices_[i];
    if (!job.matrix.tile_bytes) continue;
    const int64_t step = std::max<int64_t>(1, kChunkBytes / (job.row_bytes * kTileRows)), tiles = job.matrix.tile_count();
    for (int64_t tile = 0; tile < tiles; tile += step)
      chunks_.push_back({false, static_cast<int>(i), tile, std::min(tile + step, tiles)});
  }
  for (size_t i = 0; i < vectors_.size(); ++i) chunks_.push_back({true, static_cast<int>(i), 0, 0});
  std::stable_sort(chunks_.begin(), chunks_.end(), [this](const Chunk& a, const Chunk& b) {
    const Source& x = a.is_vector ? vectors_[a.job].source : matrices_[a.job].source;
    const Source& y = b.is_vector ? vectors_[b.job].source : matrices_[b.job].source;
    return x.file != y.file ? x.file < y.file : x.offset < y.offset;
  });
}

void Loader::allocate(bool shared) {
  if (!shared) {
    arena_ = std::make_unique<Arena>(arena_bytes_, "the weights");
    data_ = arena_->data();
    return;
  }
  const int64_t whole = shared_bytes(arena_bytes_);
  if (unclaimed_huge_bytes() >= whole) {
    try {
      segment_ = std::make_unique<Segment>(whole, true);
      place_pages(segment_->data(), whole, memory_nodes(), false);  // the reserve is the machine's, not a node's
      if (!populate_huge(segment_->data(), whole)) segment_.reset();
    } catch (const Error&) {  // somebody else was faster
    }
  }
  if (!segment_) {
    require_memory(whole, "the weights");
    segment_ = std::make_unique<Segment>(whole);
    place_pages(segment_->data(), whole, memory_nodes(), true);
    next_huge_page_ = 0;
  }
  data_ = segment_->data();
}

// Most systems give shared memory small pages only, and collapse what somebody asks for: best while all but one page of a huge one are
// still missing. That page says on which node; its place within the huge one changes, so that interleaved nodes take turns.
void Loader::make_huge_pages() {
  const int64_t count = segment_ ? segment_->size() / Segment::kHugePage : 0;
  for (int64_t i; !stop_ && (i = next_huge_page_.fetch_add(1)) < count;) {
    uint8_t* const page = data_ + i * Segment::kHugePage;
    __atomic_fetch_or(page + 4096 * (i & 7), 0, __ATOMIC_RELAXED);  // another thread may be loading into it already
    Segment::collapse(page, Segment::kHugePage);
  }
}

void Loader::start(int threads, bool shared) {
  if (data_) fail(Status::native, "the loader has started already");
  if (threads < 1 || threads > kMaxThreads) fail(Status::config, "%d loading threads: use 1 to %d", threads, kMaxThreads);
  allocate(shared);
  for (MatrixJob& job : matrices_) job.matrix.tiles = data_ + job.arena_offset;
  for (VectorJob& job : vectors_) job.data = reinterpret_cast<float*>(data_ + job.arena_offset);
  plan_chunks();
  working_ = threads;
  for (int i = 0; i < threads; ++i) {
    try {
      threads_.emplace_back(&Loader::work, this);
    } catch (const std::exception& e) {
      stop_ = true;
      { std::lock_guard<std::mutex> lock(mutex_); working_ -= threads - i; }
      fail(Status::native, "loading thread %d of %d could not start: %s", i + 1, threads, e.what());
    }
  }
}

bool Loader::wait(int milliseconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!data_) fail(Status::native, "the loader has not started");
  if (!finished_.wait_for(lock, std::chrono::milliseconds(milliseconds), [this] { return working_ == 0; })) return false;
  lock.unlock();
  join();
  if (error_) throw *error_;
  return true;
}

void Loader::work() noexcept {
  try {
    Staging staging;
    make_huge_pages();
    for (size_t i; !stop_ && (i = next_chunk_.fetch_add(1)) < chunks_.size();) load(chunks_[i], staging);
  } catch (const Error& e) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::make_unique<Error>(e);
    stop_ = true;
  } catch (const std::exception& e) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::make_unique<Error>(Status::capacity, std::string("a loading thread failed: ") + e.what());
    stop_ = true;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (--working_ == 0) finished_.notify_all();
}

void Loader::load(const Chunk& chunk, Staging& staging) {
  if (chunk.is_vector)
    load_vector(vectors_[chunk.job], staging);
  else
    load_tiles(matrices_[chunk.job], chunk.tile_begin, chunk.tile_end, staging);
}

void Loader::read(const Source& source, int64_t offset, int64_t bytes, uint8_t* out) const {
  const File& file = files_[source.file];
  for (int64_t done = 0; done < bytes;) {
    const ssize_t n = pread(file.descriptor, out + done, static_cast<size_t>(bytes - done), source.offset + offset + done);
    if (n < 0 && errno == EINTR) continue;
    const int64_t at = source.offset + offset + done;
    if (n < 0) fail(Status::model_file, "%s cannot be read at byte %" PRId64 ": %s", file.path.c_str(), at, std::strerror(errno));
    if (n == 0)
      fail(Status::model_file, "%s ends at byte %" PRId64 " of the %" PRId64 " it had when it was opened: it changed while %s was loaded",
           file.path.c_str(), at, file.size, source.name.c_str());
    done += n;
  }
}

// Reads the wanted segment of every row of the chunk. Rows that lie close are read by one call, with what is between them.
void Loader::read_rows(const MatrixJob& job, Staging& staging) const {
  const std::vector<int64_t>& rows = staging.stored_rows;
  const size_t count = rows.size();
  const bool whole = job.row_bytes - job.segment_bytes <= kWorthSkipping || 2 * job.segment_bytes >= job.row_bytes;
  const int64_t stride = whole ? job.row_bytes : job.segment_bytes;
  const auto read_span = [&](int64_t first, int64_t span, uint8_t* out) {
    const int64_t offset = first * job.row_bytes + job.segment_begin;
    if (whole) return read(job.source, offset, (span - 1) * job.row_bytes + job.segment_bytes, out);
    for (int64_t i = 0; i < span; ++i) read(job.source, offset + i * job.row_bytes, job.segment_bytes, out + i * stride);
  };

  staging.row_at.resize(count);
  const auto [low, high] = std::minmax_element(rows.begin(), rows.end());
  const int64_t span = *high - *low + 1;
  const int64_t staged = span <= 2 * static_cast<int64_t>(count) ? span : static_cast<int64_t>(count);
  if (static_cast<int64_t>(staging.bytes.size()) < staged * stride) staging.bytes.resize(staged * stride);
  uint8_t* const bytes = staging.bytes.data();
  if (staged == span) {
    read_span(*low, span, bytes);
    for (size_t i = 0; i < count; ++i) staging.row_at[i] = bytes + (rows[i] - *low) * stride;
    return;
  }
  for (size_t i = 0, end; i < count; i = end) {  // runs of neighbours
    for (end = i + 1; end < count && rows[end] == rows[end - 1] + 1;) ++end;
    read_span(rows[i], static_cast<int64_t>(end - i), bytes + i * stride);
    for (size_t j = i; j < end; ++j) staging.row_at[j] = bytes + j * stride;
  }
}

void Loader::load_tiles(const MatrixJob& job, int64_t tile_begin, int64_t tile_end, Staging& staging) {
  const Matrix& matrix = job.matrix;
  const int64_t begin = tile_begin * kTileRows, end = std::min(tile_end * kTileRows, matrix.rows);
  staging.stored_rows.clear();
  int64_t passed = 0;  // rows of the ranges before this one
  for (const RowRange& range : job.rows) {
    const int64_t size = range.end - range.begin;
    for (int64_t i = std::max<int64_t>(begin - passed, 0); i < std::min(end - passed, size); ++i)
      staging.stored_rows.push_back(stored_row(range.begin + i, job.source.head_rows));
    passed += size;
  }
  read_rows(job, staging);

  const int64_t packed_row_bytes = bytes_of(matrix.type, matrix.cols);
  if (job.quantize) {
    staging.floats.resize(matrix.cols);
    staging.quantized.resize(kTileRows * packed_row_bytes);
  }
  uint8_t* tile = const_cast<uint8_t*>(matrix.tiles) + tile_begin * matrix.tile_bytes;
  for (int64_t row = 0; row < end - begin; row += kTileRows, tile += matrix.tile_bytes) {
    const uint8_t** rows = staging.row_at.data() + row;
    const int count = static_cast<int>(std::min<int64_t>(kTileRows, end - begin - row));
    for (int i = 0; job.quantize && i < count; ++i) {
      to_float(job.source.type, rows[i], matrix.cols, staging.floats.data());
      uint8_t* const out = staging.quantized.data() + i * packed_row_bytes;
      if (!job.quantize(staging.floats.data(), matrix.cols, out))
        fail(Status::model_file, "%s: tensor %s has a value in stored row %" PRId64 " that is not finite or too large for %s",
             files_[job.source.file].path.c_str(), job.source.name.c_str(), staging.stored_rows[row + i], type_traits(matrix.type).name);
      rows[i] = out;
    }
    job.pack(rows, count, matrix.cols, tile);
  }
  progress_ += (end - begin) * job.segment_bytes;
}

void Loader::load_vector(const VectorJob& job, Staging& staging) {
  const int64_t size = job.source.rows, item = bytes_of(job.source.type, 1);
  staging.bytes.resize(std::max<size_t>(staging.bytes.size(), size * item));
  read(job.source, 0, size * item, staging.bytes.data());
  for (int64_t i = job.begin; i < job.end; ++i) {
    float* const out = job.data + (i - job.begin);
    to_float(job.source.type, staging.bytes.data() + stored_row(i, job.source.head_rows) * item, 1, out);
    if (job.plus_one) *out += 1.0f;
  }
  progress_ += (job.end - job.begin) * item;
}

}  // namespace ckdist
