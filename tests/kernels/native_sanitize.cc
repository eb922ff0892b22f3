// Runs random calls through the C++ loops of quantized matmul, on buffers without a byte to spare,
// and holds the results to plain loops. Built with sanitizers by test_native_build.py.
//
// usage: native_sanitize SEED CALLS INSTRUCTION_SET...; `threads` as the first set races a pool.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu_parallel.h"
#include "cpu_product.h"

namespace {

using namespace jaxinfer;

struct Call {
  Product p{};
  std::vector<float> x, out, scale, offset;
  std::vector<uint8_t> codes, stored_scale, stored_offset;
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int below(int count) { return static_cast<int>(engine_() % static_cast<unsigned>(count)); }
  template <size_t kCount>
  int one_of(const int (&values)[kCount]) {
    return values[below(kCount)];
  }
  float uniform() { return static_cast<float>(below(2001) - 1000) / 1000.0f; }

 private:
  std::mt19937 engine_;
};

// Values that every float type holds exactly.
float simple(Random& random) { return static_cast<float>(random.below(31) - 15) / 16.0f; }

uint16_t to_float16(float value) {  // normal values and zero only
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value == 0) return 0;
  const uint32_t exponent = ((bits >> 23) & 255) - 112;
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 0x3ff));
}

std::vector<uint8_t> stored(const std::vector<float>& values, FloatType type) {
  std::vector<uint8_t> bytes;
  for (float value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (type == FloatType::kFloat16) bits = to_float16(value);
    if (type == FloatType::kBfloat16) bits >>= 16;
    const size_t size = type == FloatType::kFloat32 ? 4 : 2;
    for (size_t i = 0; i < size; ++i) bytes.push_back(static_cast<uint8_t>(bits >> 8 * i));
  }
  bytes.shrink_to_fit();
  return bytes;
}

double fp8_value(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double magnitude =
      exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return code & 128 ? -magnitude : magnitude;
}

double code_value(const Call& call, int64_t row, int64_t column) {
  const uint8_t* codes = call.codes.data() + row * call.p.row_bytes;
  if (call.p.code == Code::kInt8) return static_cast<int8_t>(codes[column]);
  if (call.p.code == Code::kFp8) return fp8_value(codes[column]);
  const uint8_t byte = codes[column / 32 * 16 + column % 16];
  return call.p.table[column % 32 < 16 ? byte & 15 : byte >> 4];
}

void make(Random& random, int most_rows, Call& call) {
  Product& p = call.p;
  p.code = static_cast<Code>(random.below(3));
  p.scale_type = static_cast<FloatType>(random.below(3));
  p.offset_type = static_cast<FloatType>(random.below(3));
  const int groups[] = {16, 32, 64, 128, 0};
  const int group = random.one_of(groups);
  const int step = group ? (p.code == Code::kNibble && group < 32 ? 32 : group)
                         : (p.code == Code::kNibble ? 32 : 16);
  const int most_steps = random.below(4) ? 8 : 2400 / step;
  p.num_columns = static_cast<int64_t>(step) * (1 + random.below(most_steps));
  p.group_size = group ? group : p.num_columns;
  p.num_groups = p.num_columns / p.group_size;
  p.row_bytes = p.code == Code::kNibble ? p.num_columns / 2 : p.num_columns;
  p.num_rows = 1 + random.below(most_rows);
  p.num_tokens = 1 + random.below(random.below(3) ? 9 : 130);
  const bool has_offset = p.code != Code::kFp8 && random.below(2);
  for (float& value : p.table) value = simple(random);

  call.x.resize(static_cast<size_t>(p.num_tokens * p.num_columns));
  for (float& value : call.x) value = random.uniform();
  call.codes.resize(static_cast<size_t>(p.num_rows * p.row_bytes));
  for (uint8_t& byte : call.codes) {
    byte = static_cast<uint8_t>(random.below(256));
    if (p.code == Code::kFp8 && (byte & 127) == 127) byte = 1;  // NaN has a test in Python
  }
  call.scale.resize(static_cast<size_t>(p.num_rows * p.num_groups));
  call.offset.resize(call.scale.size());
  for (float& value : call.scale) value = simple(random);
  for (float& value : call.offset) value = has_offset ? simple(random) : 0.0f;
  call.stored_scale = stored(call.scale, p.scale_type);
  call.stored_offset = stored(call.offset, p.offset_type);
  call.out.assign(static_cast<size_t>(p.num_tokens * p.num_rows), NAN);
  p.x = call.x.data();
  p.codes = call.codes.data();
  p.scale = call.stored_scale.data();
  p.offset = has_offset ? call.stored_offset.data() : nullptr;
  p.out = call.out.data();
}

// A thread a task: some start after the call is over.
struct Pool {
  std::vector<std::thread> started;

  template <class Task>
  void Schedule(Task&& task) {
    started.emplace_back(std::forward<Task>(task));
  }
  ~Pool() {
    for (std::thread& thread : started) thread.join();
  }
};

void run_threads(const Product& p, MultiplyRows* multiply_rows, Pool& pool) {
  run_chunks(pool, 4, (p.num_rows + 15) / 16, [p, multiply_rows](int64_t chunk) {
    multiply_rows(p, chunk * 16, std::min<int64_t>(chunk * 16 + 16, p.num_rows));
  });
}

bool is_right(Random& random, const Call& call) {
  const Product& p = call.p;
  for (int64_t t = 0; t < p.num_tokens; t += 1 + random.below(8)) {
    for (int64_t row = 0; row < p.num_rows; ++row) {
      double wanted = 0, size = 0;
      for (int64_t column = 0; column < p.num_columns; ++column) {
        const size_t at = static_cast<size_t>(row * p.num_groups + column / p.group_size);
        const double weight = call.scale[at] * code_value(call, row, column) + call.offset[at];
        const double product = call.x[static_cast<size_t>(t * p.num_columns + column)] * weight;
        wanted += product;
        size += product * product;
      }
      const double error = std::fabs(call.out[static_cast<size_t>(t * p.num_rows + row)] - wanted);
      if (!(error <= 1e-5 * std::sqrt(size) + 1e-6)) {
        std::fprintf(stderr, "code %d group %d [%d, %d] x %d: %g is off by %g\n",
                     static_cast<int>(p.code), static_cast<int>(p.group_size),
                     static_cast<int>(p.num_rows), static_cast<int>(p.num_columns),
                     static_cast<int>(p.num_tokens), wanted, error);
        return false;
      }
    }
  }
  return true;
}

bool run_and_check(Random& random, MultiplyRows* multiply_rows, bool threads) {
  Call call;
  make(random, threads ? 200 : 23, call);
  Pool pool;
  if (threads) {
    run_threads(call.p, multiply_rows, pool);
  } else {
    const int64_t cut = random.below(static_cast<int>(call.p.num_rows) + 1);
    multiply_rows(call.p, 0, cut);
    multiply_rows(call.p, cut, call.p.num_rows);
  }
  return is_right(random, call);
}

MultiplyRows* find(const std::string& name) {
  if (name == "portable") return multiply_rows_portable;
#if defined(__x86_64__)
  if (name == "avx2") return multiply_rows_avx2;
  if (name == "avx512") return multiply_rows_avx512;
#endif
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const bool threads = std::string(argv[3]) == "threads";
  for (int i = threads ? 4 : 3; i < argc; ++i) {
    Random random(static_cast<unsigned>(std::atoi(argv[1])));
    MultiplyRows* multiply_rows = find(argv[i]);
    if (multiply_rows == nullptr) return 2;
    for (int call = 0; call < std::atoi(argv[2]); ++call) {
      if (!run_and_check(random, multiply_rows, threads)) return 1;
    }
  }
  std::puts("ok");
  return 0;
}
