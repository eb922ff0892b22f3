// The jax.ffi handler of a stack of decoder layers on CPUs: it checks a call's buffers and runs
// the stages of cpu_step.h on XLA's own threads.
//
// Handlers' names carry a version: a program from a compilation cache finds the handler that it
// was compiled for, or none. Raise it whenever operands, attributes or results change.

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "../cpp/handler.h"
#include "../cpp/instruction_sets.h"
#include "../cpp/parallel.h"
#include "../paged_attention/cpu_best.h"
#include "../paged_attention/cpu_describe.h"
#include "../quantized_matmul/cpu_describe.h"
#include "cpu_decoder.h"
#include "cpu_step.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using namespace jaxinfer;

// Of kernels/decoder_layers/cpu.py.
constexpr std::string_view kCodes[] = {"int8", "fp8", "int4", "uint4", "int5", "uint5"};

// Operands and numbers one after the other, each checked when it is taken. After the first
// mistake, `problem` says what it was and nothing that was taken may be used.
class Reader {
 public:
  // `x` stands in for operands that are not there.
  Reader(ffi::AnyBuffer x, ffi::RemainingArgs args, ffi::Span<const int64_t> numbers)
      : x_(x), args_(args), numbers_(numbers) {}

  std::string problem;
  bool has_blocks = false;    // whether any matrix has its rows in blocks
  bool are_integers = true;   // whether the codes of all are integers

  void fail(const std::string& text) {
    if (problem.empty()) problem = text;
  }

  ffi::AnyBuffer buffer() {
    auto taken = args_.get<ffi::AnyBuffer>(next_++);
    if (taken.has_value()) return *taken;
    fail("there are only " + std::to_string(args_.size()) + " operands");
    return x_;
  }

  int64_t number() {
    if (next_number_ < numbers_.size()) return numbers_[next_number_++];
    fail("there are only " + std::to_string(numbers_.size()) + " numbers");
    return 0;
  }

  // A vector of floats; null for an empty one, where it may be absent.
  const float* vector(int64_t size, const char* name, bool may_be_absent) {
    const ffi::AnyBuffer taken = buffer();
    if (may_be_absent && is_absent(taken)) return nullptr;
    const auto sizes = taken.dimensions();
    if (taken.element_type() != ffi::F32 || sizes.size() != 1 || sizes[0] != size) {
      fail(std::string(name) + " is " + describe(taken) + ": needs float32 [" +
           std::to_string(size) + "]");
    }
    return static_cast<const float*>(taken.untyped_data());
  }

  // A matrix of `num_blocks` blocks, whose pieces have whole slots of them.
  Matrix matrix(int64_t num_blocks, int64_t num_rows, int64_t num_columns, int64_t slot_rows,
                const char* name) {
    Matrix m{};
    m.num_rows = num_rows;
    const int64_t count = number();
    if (count < 1 || count > Matrix::kMostPieces) {
      fail(std::string(name) + " has " + std::to_string(count) + " pieces");
      return m;
    }
    m.num_pieces = static_cast<int>(count);
    int64_t rows = 0;
    for (int i = 0; i < m.num_pieces && problem.empty(); ++i) {
      m.block_rows[i] = number();
      piece(m.pieces[i], num_columns, name);
      if (m.block_rows[i] < 1 || m.block_rows[i] % slot_rows != 0 ||
          m.pieces[i].num_rows % num_blocks != 0 ||
          m.pieces[i].num_rows / num_blocks != m.block_rows[i]) {
        fail(std::string(name) + " has a piece of " + std::to_string(m.pieces[i].num_rows) +
             " rows, not of " + std::to_string(num_blocks) + " blocks of whole slots");
      }
      rows += m.pieces[i].num_rows;
    }
    if (rows != num_rows) {
      fail(std::string(name) + " has " + std::to_string(rows) + " rows: needs " +
           std::to_string(num_rows));
    }
    m.bias = vector(num_rows, name, true);
    return m;
  }

  bool is_at_end() const { return next_ == args_.size() && next_number_ == numbers_.size(); }

 private:
  void piece(Product& p, int64_t num_columns, const char* name) {
    const int64_t code = number(), row_block = number();
    const ffi::AnyBuffer codes = buffer(), scale = buffer(), offset = buffer(), book = buffer();
    if (!problem.empty()) return;
    if (code < 0 || code >= static_cast<int64_t>(std::size(kCodes))) return fail("unknown code");
    const std::string wrong =
        describe_weights(codes, scale, offset, book, kCodes[code], row_block, num_columns, p);
    if (!wrong.empty()) fail(std::string(name) + ": " + wrong);
    has_blocks = has_blocks || p.in_blocks;
    are_integers = are_integers && p.code_bias >= 0;
  }

  ffi::AnyBuffer x_;
  ffi::RemainingArgs args_;
  ffi::Span<const int64_t> numbers_;
  size_t next_ = 0, next_number_ = 0;
};

bool is_int32(const ffi::AnyBuffer& buffer, std::initializer_list<int64_t> sizes) {
  const auto actual = buffer.dimensions();
  return buffer.element_type() == ffi::S32 &&
         std::equal(actual.begin(), actual.end(), sizes.begin(), sizes.end());
}

template <class Number>
const Number* data_of(const ffi::AnyBuffer& buffer) {
  return static_cast<const Number*>(buffer.untyped_data());
}

std::string describe_rows(const ffi::AnyBuffer& num_seqs, const ffi::AnyBuffer& kv_lens,
                          const ffi::AnyBuffer& cu_q_lens, const ffi::AnyBuffer& slots,
                          const ffi::AnyBuffer& page_table, bool is_decode, StepShape& s,
                          int64_t& num_groups) {
  const auto table = page_table.dimensions();
  if (page_table.element_type() != ffi::S32 || table.size() != 3) {
    return "page_table is " + describe(page_table) + ": needs int32 [C, B, M]";
  }
  num_groups = table[0], s.rows.num_rows = table[1], s.max_pages = table[2];
  if (!is_int32(num_seqs, {}) || !is_int32(kv_lens, {s.rows.num_rows}) ||
      !is_int32(cu_q_lens, {s.rows.num_rows + 1}) || !is_int32(slots, {num_groups, s.all_tokens})) {
    return "num_seqs " + describe(num_seqs) + ", kv_lens " + describe(kv_lens) + ", cu_q_lens " +
           describe(cu_q_lens) + " and slot_mapping " + describe(slots) +
           " do not fit page_table " + describe(page_table);
  }
  if (is_decode && s.all_tokens != s.rows.num_rows) return "a decode step has a token a row";
  const int64_t seqs = std::clamp<int64_t>(*data_of<int32_t>(num_seqs), 0, s.rows.num_rows);
  const int64_t tokens = is_decode ? seqs : data_of<int32_t>(cu_q_lens)[seqs];
  s.num_tokens = std::clamp<int64_t>(tokens, 0, s.all_tokens);
  s.rows.num_seqs = seqs, s.rows.num_tokens = s.num_tokens;
  s.rows.kv_lens = data_of<int32_t>(kv_lens);
  s.rows.cu_q_lens = is_decode ? nullptr : data_of<int32_t>(cu_q_lens);
  s.slots = data_of<int32_t>(slots), s.page_tables = data_of<int32_t>(page_table);
  return "";
}

std::vector<Rotary> read_rotaries(Reader& reader, int64_t count, const StepShape& s) {
  std::vector<Rotary> rotaries;
  for (int64_t i = 0; i < count && reader.problem.empty(); ++i) {
    const ffi::AnyBuffer cos = reader.buffer(), sin = reader.buffer();
    for (const auto& table : {cos, sin}) {
      if (!is_matrix(table, s.all_tokens, s.head_dim / 2) || table.element_type() != ffi::F32) {
        reader.fail("a rotary table is " + describe(table));
      }
    }
    rotaries.push_back({data_of<float>(cos), data_of<float>(sin)});
  }
  return rotaries;
}

Layer read_layer(Reader& reader, const StepShape& s, const Cache& cache, int64_t num_rotaries,
                 int64_t num_groups) {
  Layer layer{};
  const int64_t heads = s.num_heads * s.head_dim;
  layer.cache = cache;
  layer.rotary = reader.number(), layer.group = reader.number(), layer.window = reader.number();
  if (layer.rotary < 0 || layer.rotary >= num_rotaries || layer.group < 0 ||
      layer.group >= num_groups || layer.window < 0) {
    reader.fail("a layer's rotary table, group or window is not there");
  }
  if (layer.window == 0) layer.window = std::numeric_limits<int32_t>::max();
  layer.input_norm = reader.vector(s.hidden, "input_norm", false);
  layer.qkv = reader.matrix(s.num_kv_heads, heads + 2 * s.num_kv_heads * s.head_dim, s.hidden,
                            s.head_dim, "qkv");
  layer.query_norm = reader.vector(s.head_dim, "query_norm", true);
  layer.key_norm = reader.vector(s.head_dim, "key_norm", true);
  layer.out = reader.matrix(1, s.hidden, heads, s.hidden, "out");
  layer.attention_norm = reader.vector(s.hidden, "attention_norm", true);
  layer.mlp_input_norm = reader.vector(s.hidden, "mlp_input_norm", false);
  layer.gate_up = reader.matrix(1, 2 * s.intermediate, s.hidden, s.intermediate, "gate_up");
  layer.down = reader.matrix(1, s.hidden, s.intermediate, s.hidden, "down");
  layer.mlp_norm = reader.vector(s.hidden, "mlp_norm", true);
  return layer;
}

std::vector<Cache> read_caches(Reader& reader, int64_t count, const StepShape& s,
                               ffi::RemainingRets& written) {
  std::vector<Cache> caches;
  for (int64_t i = 0; i < count && reader.problem.empty(); ++i) {
    Cache cache{};
    const ffi::AnyBuffer elements = reader.buffer();
    const std::string wrong = describe_elements(elements, cache);
    if (!wrong.empty()) reader.fail(wrong);
    if (cache.type == Elements::kInt8 || cache.num_kv_heads != s.num_kv_heads ||
        cache.head_dim != s.head_dim) {
      reader.fail("the cache " + describe(elements) + " does not fit the layers' heads");
    }
    // Layers with one page table are planned together.
    if (!caches.empty() && cache.page_size != caches[0].page_size) {
      reader.fail("the caches' pages differ in size");
    }
    auto result = written.get<ffi::AnyBuffer>(static_cast<size_t>(i));
    // XLA has already copied a cache that it may not overwrite.
    if (!result.has_value() || (*result)->untyped_data() != elements.untyped_data()) {
      reader.fail("results must be aliases of the caches");
    }
    caches.push_back(cache);
  }
  return caches;
}

template <Kernels (*kernels)()>
ffi::Error run_layers(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer num_seqs,
                      ffi::AnyBuffer kv_lens, ffi::AnyBuffer cu_q_lens, ffi::AnyBuffer slots,
                      ffi::AnyBuffer page_table, ffi::RemainingArgs others,
                      ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                      ffi::RemainingRets written, int64_t num_layers, int64_t num_rotaries,
                      int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                      int64_t intermediate, int64_t activation, float eps, float scale,
                      float soft_cap, bool rounds, bool is_decode, ffi::Span<const int64_t> layout) {
  const auto invalid = [](const std::string& message) {
    return ffi::Error::InvalidArgument("decoder_layers on cpu: " + message);
  };
  const auto sizes = x.dimensions();
  if (x.element_type() != ffi::F32 || sizes.size() != 2 || !is_matrix(*out, sizes[0], sizes[1]) ||
      out->element_type() != ffi::F32) {
    return invalid("x is " + describe(x) + " and the result " + describe(*out) +
                   ": needs float32 [T, D]");
  }
  if (num_kv_heads < 1 || num_heads < 1 || num_heads % num_kv_heads != 0 || head_dim < 8 ||
      head_dim % 8 != 0 || intermediate < 1 || activation < 0 || activation > 1) {
    return invalid("impossible sizes");
  }
  StepShape s{};
  s.all_tokens = sizes[0], s.hidden = sizes[1];
  s.num_heads = num_heads, s.num_kv_heads = num_kv_heads, s.head_dim = head_dim;
  s.intermediate = intermediate, s.activation = static_cast<Activation>(activation);
  s.eps = eps, s.scale = scale, s.soft_cap = soft_cap;
  int64_t num_groups = 0;
  const std::string wrong = describe_rows(num_seqs, kv_lens, cu_q_lens, slots, page_table,
                                          is_decode, s, num_groups);
  if (!wrong.empty()) return invalid(wrong);
  if (static_cast<int64_t>(workspace->element_count()) < Workspace::num_floats(s) ||
      workspace->element_type() != ffi::F32) {
    return invalid("the workspace is " + describe(*workspace));
  }
  Reader reader(x, others, layout);
  const std::vector<Rotary> rotaries = read_rotaries(reader, num_rotaries, s);
  const std::vector<Cache> caches = read_caches(reader, num_layers, s, written);
  std::vector<Layer> layers;
  for (size_t i = 0; i < caches.size() && reader.problem.empty(); ++i) {
    layers.push_back(read_layer(reader, s, caches[i], num_rotaries, num_groups));
  }
  if (reader.problem.empty() && !reader.is_at_end()) reader.fail("there are too many operands");
  if (!reader.problem.empty()) return invalid(reader.problem);

  auto* const to = static_cast<float*>(out->untyped_data());
  if (to != x.untyped_data()) std::memcpy(to, x.untyped_data(), x.size_bytes());
  if (s.num_tokens == 0) return ffi::Error::Success();
  const Kernels k = kernels();
  if (rounds && reader.has_blocks) {
    s.rounding = k.multipliers.rounding_of(s.all_tokens, reader.are_integers);
  }
  if (reader.has_blocks && !k.multipliers.blocks) return invalid("weights in blocks need AVX-512");
  Team team(pool, std::max<int64_t>(pool.num_threads(), 1));
  Step step(s, rotaries, to, static_cast<float*>(workspace->untyped_data()), k, team);
  for (const Layer& layer : layers) step.run(layer);
  return ffi::Error::Success();
}

Kernels portable() {
  return {&decoder_loops_portable, &attention_loops_portable, multipliers_portable()};
}
#if defined(__x86_64__)
Kernels avx2() { return {&decoder_loops_avx2, &attention_loops_avx2, multipliers_avx2()}; }
Kernels avx512() {
  return {&decoder_loops_avx512, &attention_loops_avx512, multipliers_avx512()};
}
Kernels avx512bf16() {
  return {&decoder_loops_avx512, &attention_avx512bf16(), multipliers_avx512bf16()};
}
Kernels amx() { return {&decoder_loops_avx512, &attention_amx(), multipliers_amx()}; }
#endif

Kernels best() {
  static const Kernels kernels = {&JAXINFER_BEST(decoder_loops), &attention_best(),
                                  multipliers_best()};
  return kernels;
}

}  // namespace

#define JAXINFER_HANDLER(name, kernels)                                  \
  extern "C" JAXINFER_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame*);    \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, run_layers<kernels>,               \
                                ffi::Ffi::Bind()                         \
                                    .Ctx<ffi::ThreadPool>()              \
                                    .Arg<ffi::AnyBuffer>()               \
                                    .Arg<ffi::AnyBuffer>()               \
                                    .Arg<ffi::AnyBuffer>()               \
                                    .Arg<ffi::AnyBuffer>()               \
                                    .Arg<ffi::AnyBuffer>()               \
                                    .Arg<ffi::AnyBuffer>()               \
                                    .RemainingArgs()                     \
                                    .Ret<ffi::AnyBuffer>()               \
                                    .Ret<ffi::AnyBuffer>()               \
                                    .RemainingRets()                     \
                                    .Attr<int64_t>("num_layers")         \
                                    .Attr<int64_t>("num_rotaries")       \
                                    .Attr<int64_t>("num_heads")          \
                                    .Attr<int64_t>("num_kv_heads")       \
                                    .Attr<int64_t>("head_dim")           \
                                    .Attr<int64_t>("intermediate")       \
                                    .Attr<int64_t>("activation")         \
                                    .Attr<float>("eps")                  \
                                    .Attr<float>("scale")                \
                                    .Attr<float>("soft_cap")             \
                                    .Attr<bool>("rounds")                \
                                    .Attr<bool>("is_decode")             \
                                    .Attr<ffi::Span<const int64_t>>("layout"))

JAXINFER_HANDLER(jaxinfer_decoder_layers_v3, best);
// For tests, and to measure one against another.
JAXINFER_HANDLER(jaxinfer_decoder_layers_v3_portable, portable);
#if defined(__x86_64__)
JAXINFER_HANDLER(jaxinfer_decoder_layers_v3_avx2, avx2);
JAXINFER_HANDLER(jaxinfer_decoder_layers_v3_avx512, avx512);
JAXINFER_HANDLER(jaxinfer_decoder_layers_v3_avx512bf16, avx512bf16);
JAXINFER_HANDLER(jaxinfer_decoder_layers_v3_amx, amx);
#endif
