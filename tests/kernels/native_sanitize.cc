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
#include <optional>
#include <string>
#include <vector>

#include "../cpp/parallel.h"
#include "native_sanitize.h"

namespace {

using namespace jaxinfer;

struct Call {
  Product p{};
  Rounding rounding{};
  std::vector<float> x, out, scale, offset, rounded;
  std::vector<uint8_t> codes, stored_codes, stored_scale, stored_offset;
  std::optional<RoundedTokens> tokens;
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
  const int64_t row_bytes = static_cast<int64_t>(call.codes.size()) / call.p.num_rows;
  const uint8_t* codes = call.codes.data() + row * row_bytes;
  if (call.p.code == Code::kFiveBits) return codes[column] - call.p.code_bias;
  if (call.p.code == Code::kInt8) return static_cast<int8_t>(codes[column]);
  if (call.p.code == Code::kFp8) return fp8_value(codes[column]);
  const uint8_t byte = codes[column / 32 * 16 + column % 16];
  return call.p.table[column % 32 < 16 ? byte & 15 : byte >> 4];
}

// Of each block of rows, `width` elements of every row, then the next `width` of every row; four
// are the bytes of a dword, the two in the middle exchanged.
template <class Element>
std::vector<Element> in_blocks(const std::vector<Element>& from, int64_t num_rows, int64_t width) {
  constexpr int64_t kExchanged[] = {0, 2, 1, 3};
  const int64_t columns = static_cast<int64_t>(from.size()) / num_rows;
  std::vector<Element> to;
  for (int64_t block = 0; block < num_rows; block += kBlockRows) {
    for (int64_t column = 0; column < columns; column += width) {
      for (int64_t row = block; row < block + kBlockRows; ++row) {
        for (int64_t i = 0; i < width; ++i) {
          const int64_t at = row * columns + column + (width == 4 ? kExchanged[i] : i);
          to.push_back(from[static_cast<size_t>(at)]);
        }
      }
    }
  }
  to.shrink_to_fit();
  return to;
}

// Of every 512 bytes of codes, eight registers, low halves of both of four pairs of registers, then
// a fifth bit of each register in every byte.
std::vector<uint8_t> in_five_bits(const std::vector<uint8_t>& from) {
  std::vector<uint8_t> to;
  for (size_t chunk = 0; chunk < from.size(); chunk += 512) {
    for (size_t i = 0; i < 256; ++i) {
      to.push_back(static_cast<uint8_t>((from[chunk + i] & 15) | from[chunk + 256 + i] << 4));
    }
    for (size_t i = 0; i < 64; ++i) {
      int bits = 0;
      for (size_t j = 0; j < 8; ++j) bits |= from[chunk + 64 * j + i] >> 4 << j;
      to.push_back(static_cast<uint8_t>(bits));
    }
  }
  to.shrink_to_fit();
  return to;
}

// Makes what it says in `call.p` and `call.rounding` of the sizes there.
void fill(Random& random, bool has_offset, Call& call) {
  Product& p = call.p;
  call.x.resize(static_cast<size_t>(p.num_tokens * p.num_columns));
  for (float& value : call.x) value = call.rounding ? simple(random) : random.uniform();
  const bool is_5bit = p.code == Code::kFiveBits;
  call.codes.resize(static_cast<size_t>(p.num_rows * (is_5bit ? p.num_columns : p.row_bytes)));
  for (uint8_t& byte : call.codes) {
    byte = static_cast<uint8_t>(random.below(is_5bit ? 32 : 256));
    if (p.code == Code::kFp8 && (byte & 127) == 127) byte = 1;  // NaN has a test in Python
  }
  call.scale.resize(static_cast<size_t>(p.num_rows * p.num_groups));
  call.offset.resize(call.scale.size());
  for (float& value : call.scale) value = simple(random);
  for (float& value : call.offset) value = has_offset ? simple(random) : 0.0f;
  call.stored_codes = p.in_blocks ? in_blocks(call.codes, p.num_rows, 4) : call.codes;
  if (is_5bit) call.stored_codes = in_five_bits(call.stored_codes);
  const auto lay_out = [&p](const std::vector<float>& values, FloatType type) {
    return stored(p.in_blocks ? in_blocks(values, p.num_rows, 1) : values, type);
  };
  call.stored_scale = lay_out(call.scale, p.scale_type);
  call.stored_offset = lay_out(call.offset, p.offset_type);
  call.out.assign(static_cast<size_t>(p.num_tokens * p.num_rows), NAN);
  p.x = call.x.data();
  p.codes = call.stored_codes.data();
  p.scale = call.stored_scale.data();
  p.offset = has_offset ? call.stored_offset.data() : nullptr;
  p.out = call.out.data();
}

// What follows the tokens is nobody's to use, but for the zeros that fill a tile.
void round_tokens(Call& call) {
  const Product& p = call.p;
  call.rounded.assign(
      static_cast<size_t>(RoundedTokens::num_floats(p.num_tokens, p.num_columns)), NAN);
  call.tokens.emplace(call.rounding, p.num_tokens, p.num_columns, call.rounded.data());
  if (!call.rounding) return;
  for (int64_t t = 0; t < p.num_tokens; ++t) call.tokens->pack(p.x + t * p.num_columns, t);
}

void make(Random& random, const Multipliers& multipliers, int most_rows, Call& call) {
  Product& p = call.p;
  p.code = static_cast<Code>(random.below(multipliers.blocks ? 4 : 3));
  const bool is_5bit = p.code == Code::kFiveBits;
  p.in_blocks = is_5bit || (multipliers.blocks && p.code != Code::kFp8 && random.below(4));
  p.scale_type = static_cast<FloatType>(random.below(3));
  p.offset_type = static_cast<FloatType>(random.below(3));
  const int groups[] = {16, 32, 64, 128, 0};
  const int group = random.one_of(groups);
  const int multiple = p.code == Code::kNibble || p.in_blocks ? 32 : 16;
  const int step = group > multiple ? group : multiple;
  const int most_steps = random.below(4) ? 8 : 2400 / step;
  p.num_columns = static_cast<int64_t>(step) * (1 + random.below(most_steps));
  p.group_size = group ? group : p.num_columns;
  p.num_groups = p.num_columns / p.group_size;
  p.row_bytes = p.num_columns / 8 * (p.code == Code::kNibble ? 4 : is_5bit ? 5 : 8);
  p.num_rows = 1 + random.below(most_rows);
  if (p.in_blocks) p.num_rows = (p.num_rows + kBlockRows - 1) / kBlockRows * kBlockRows;
  p.num_tokens = 1 + random.below(random.below(3) ? 9 : 130);
  const bool has_offset = p.code != Code::kFp8 && random.below(2);
  p.code_bias = p.code == Code::kInt8 ? 128 : is_5bit ? 16 * random.below(2) : -1;
  for (float& value : p.table) value = simple(random);
  if (p.code == Code::kNibble && random.below(2)) {
    p.code_bias = 8 * random.below(2);
    for (int i = 0; i < 16; ++i) p.table[i] = static_cast<float>(i - p.code_bias);
  }
  if (p.in_blocks && random.below(4)) {
    // Codes that are integers may meet bfloat16 numbers, too.
    call.rounding = multipliers.rounding_of(p.num_tokens, p.code_bias >= 0 && random.below(2));
  }
  p.has_many_tokens = p.num_tokens >= kManyTokens || random.below(4) == 0;
  fill(random, has_offset, call);
  round_tokens(call);
}

void multiply(const Multipliers& multipliers, Call& call, int64_t first, int64_t last) {
  multipliers.multiply(call.p, *call.tokens, first, last);
}

void run_threads(const Multipliers& multipliers, Call& call, Pool& pool) {
  run_chunks(pool, 4, (call.p.num_rows + 15) / 16, [&](int64_t chunk) {
    const int64_t last = std::min<int64_t>(chunk * 16 + 16, call.p.num_rows);
    multiply(multipliers, call, chunk * 16, last);
  });
}

bool is_right(Random& random, const Call& call) {
  const Product& p = call.p;
  for (int64_t t = 0; t < p.num_tokens; t += 1 + random.below(8)) {
    for (int64_t row = 0; row < p.num_rows; ++row) {
      double wanted = 0, size = 0, magnitude = 0, weights = 0;
      for (int64_t column = 0; column < p.num_columns; ++column) {
        const size_t at = static_cast<size_t>(row * p.num_groups + column / p.group_size);
        const double scaled = call.scale[at] * code_value(call, row, column);
        const double x = call.x[static_cast<size_t>(t * p.num_columns + column)];
        const double product = x * (scaled + call.offset[at]);
        // Rounded tokens meet codes and offsets apart.
        const double terms = std::fabs(x) * (std::fabs(scaled) + std::fabs(call.offset[at]));
        wanted += product;
        weights += std::fabs(scaled + call.offset[at]);
        size += call.rounding ? terms * terms : product * product;
        magnitude += std::fabs(product);
      }
      const double error = std::fabs(call.out[static_cast<size_t>(t * p.num_rows + row)] - wanted);
      // x, of at most 15/16, is rounded to 15 or to 8 bits; where it is not, many meet weights that
      // are, to 8 bits.
      const double rounded = call.rounding.integers ? weights / 16319 / 2
                             : call.rounding.bytes  ? weights / 127 / 2
                             : call.rounding && p.has_many_tokens ? magnitude * 0x1p-9 : 0;
      if (!(error <= 1e-5 * std::sqrt(size) + rounded + 1e-6)) {
        std::fprintf(stderr, "code %d group %d blocks %d rounds %d [%d, %d] x %d: %g is off by %g\n",
                     static_cast<int>(p.code), static_cast<int>(p.group_size), p.in_blocks,
                     call.rounding ? 1 : 0, static_cast<int>(p.num_rows), static_cast<int>(p.num_columns),
                     static_cast<int>(p.num_tokens), wanted, error);
        return false;
      }
    }
  }
  return true;
}

bool run_and_check(Random& random, const Multipliers& multipliers, bool threads) {
  Call call;
  make(random, multipliers, threads ? 200 : 40, call);
  Pool pool;
  if (threads) {
    run_threads(multipliers, call, pool);
  } else {
    int64_t cut = random.below(static_cast<int>(call.p.num_rows) + 1);
    if (call.p.in_blocks) cut = cut / kBlockRows * kBlockRows;
    multiply(multipliers, call, 0, cut);
    multiply(multipliers, call, cut, call.p.num_rows);
  }
  return is_right(random, call);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const bool threads = std::string(argv[3]) == "threads";
  for (int i = threads ? 4 : 3; i < argc; ++i) {
    Random random(static_cast<unsigned>(std::atoi(argv[1])));
    const Multipliers multipliers = find_multipliers(argv[i]);
    if (multipliers.rows == nullptr) return 2;
    for (int call = 0; call < std::atoi(argv[2]); ++call) {
      if (!run_and_check(random, multipliers, threads)) return 1;
    }
  }
  std::puts("ok");
  return 0;
}
