// The jax.ffi handlers of paged attention on CPUs: they check a call's buffers and cut its rows
// into tiles for XLA's own threads. The arithmetic is in cpu_rows.cc.
//
// Handlers' names carry a version: a program from a compilation cache finds the handler that it
// was compiled for, or none. Raise it whenever operands, attributes or results change.

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "../cpp/handler.h"
#include "../cpp/instruction_sets.h"
#include "../cpp/parallel.h"
#include "cpu_attention.h"
#include "cpu_best.h"
#include "cpu_describe.h"
#include "cpu_plan.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using namespace jaxinfer;

ffi::Error invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("paged_attention on cpu: " + message);
}

bool has_shape(const ffi::AnyBuffer& buffer, ffi::DataType type, std::vector<int64_t> sizes) {
  const auto actual = buffer.dimensions();
  return buffer.element_type() == type &&
         std::equal(actual.begin(), actual.end(), sizes.begin(), sizes.end());
}

// The scales of int8 codes are one more operand, which no other cache has.
ffi::Error describe_cache(ffi::AnyBuffer elements, ffi::RemainingArgs others, Cache& cache) {
  const std::string problem = describe_elements(elements, cache);
  if (!problem.empty()) return invalid(problem);
  const bool is_int8 = cache.type == Elements::kInt8;
  if (others.size() != (is_int8 ? 1 : 0)) return invalid("int8 codes, and they alone, have scales");
  if (!is_int8) return ffi::Error::Success();
  const auto scales = others.get<ffi::AnyBuffer>(0);
  if (!scales.has_value()) return scales.error();
  if (!has_shape(*scales, ffi::F32,
                 {cache.num_pages, cache.num_kv_heads, 2, cache.page_size})) {
    return invalid("scales " + describe(*scales) + " do not fit the cache " + describe(elements));
  }
  cache.scales = static_cast<float*>(scales->untyped_data());
  return ffi::Error::Success();
}

template <class Number>
const Number* data_of(const ffi::AnyBuffer& buffer) {
  return static_cast<const Number*>(buffer.untyped_data());
}

// Checks the queries and the rows' metadata, and describes the call to the loops.
ffi::Error describe_attention(ffi::AnyBuffer q, ffi::AnyBuffer page_table, ffi::AnyBuffer kv_lens,
                              ffi::AnyBuffer cu_q_lens, ffi::AnyBuffer num_seqs,
                              ffi::AnyBuffer out, int64_t group, bool is_decode, Attention& p,
                              Rows& rows) {
  const auto sizes = q.dimensions();
  const Cache& cache = p.cache;
  if (q.element_type() != ffi::F32 || sizes.size() != 3 || sizes[2] != cache.head_dim ||
      sizes[1] == 0 || sizes[1] % cache.num_kv_heads != 0) {
    return invalid("q is " + describe(q) + ": needs float32 [T, N, H] that fits the cache");
  }
  rows.num_tokens = sizes[0], p.num_heads = sizes[1];
  const auto table = page_table.dimensions();
  if (page_table.element_type() != ffi::S32 || table.size() != 3 || group < 0 ||
      group >= table[0]) {
    return invalid("page_table is " + describe(page_table) + ": needs int32 [G, B, M], G above " +
                   std::to_string(group));
  }
  rows.num_rows = table[1], p.max_pages = table[2];
  if (!has_shape(kv_lens, ffi::S32, {rows.num_rows}) ||
      !has_shape(cu_q_lens, ffi::S32, {rows.num_rows + 1}) || !has_shape(num_seqs, ffi::S32, {})) {
    return invalid("kv_lens " + describe(kv_lens) + ", cu_q_lens " + describe(cu_q_lens) +
                   " and num_seqs " + describe(num_seqs) + " do not fit page_table " +
                   describe(page_table) + ": int32 [B], [B + 1] and []");
  }
  if (is_decode && rows.num_tokens != rows.num_rows) {
    return invalid("a decode step has a token for each row, not " + describe(q));
  }
  if (!has_shape(out, ffi::F32, {sizes.begin(), sizes.end()})) {
    return invalid("the result is " + describe(out) + ": needs the shape of q, " + describe(q));
  }
  p.q = data_of<float>(q);
  p.out = static_cast<float*>(out.untyped_data());
  p.page_table = data_of<int32_t>(page_table) + group * rows.num_rows * p.max_pages;
  rows.kv_lens = data_of<int32_t>(kv_lens);
  rows.cu_q_lens = is_decode ? nullptr : data_of<int32_t>(cu_q_lens);
  rows.num_seqs = *data_of<int32_t>(num_seqs);
  return ffi::Error::Success();
}

template <const Loops& (*loops)()>
ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer elements,
                  ffi::AnyBuffer page_table, ffi::AnyBuffer kv_lens, ffi::AnyBuffer cu_q_lens,
                  ffi::AnyBuffer num_seqs, ffi::RemainingArgs scales,
                  ffi::Result<ffi::AnyBuffer> out, int64_t group, int64_t window, float scale,
                  float soft_cap, bool is_decode) {
  Attention p{};
  Rows rows{};
  ffi::Error error = describe_cache(elements, scales, p.cache);
  if (error.failure()) return error;
  error = describe_attention(q, page_table, kv_lens, cu_q_lens, num_seqs, *out, group, is_decode,
                             p, rows);
  if (error.failure()) return error;
  if (window < 0 || !(soft_cap >= 0)) return invalid("window and soft_cap must not be negative");
  p.window = window > 0 ? window : std::numeric_limits<int32_t>::max();
  p.scale = scale, p.soft_cap = soft_cap;

  const int64_t num_threads = std::max<int64_t>(pool.num_threads(), 1);
  Plan plan(p, rows, tile_rows(loops(), p.cache), num_threads);
  const auto run = [&p, &plan](int64_t i) {
    loops().attend(p, plan.tiles[i], thread_scratch(plan.scratch_floats));
  };
  const int64_t num_tiles = static_cast<int64_t>(plan.tiles.size());
  if (num_threads == 1 || plan.is_tiny) {
    for (int64_t i = 0; i < num_tiles; ++i) run(i);
  } else {
    run_chunks(pool, num_threads, num_tiles, run);
  }
  for (const Tile& tile : plan.merges) loops().merge(p, tile);
  return ffi::Error::Success();
}

template <const Loops& (*loops)()>
ffi::Error write(ffi::AnyBuffer elements, ffi::AnyBuffer new_kv, ffi::AnyBuffer slots,
                 ffi::RemainingArgs scales, ffi::Result<ffi::AnyBuffer> written,
                 ffi::RemainingRets written_scales) {
  Write p{};
  ffi::Error error = describe_cache(elements, scales, p.cache);
  if (error.failure()) return error;
  const auto sizes = new_kv.dimensions();
  p.num_tokens = sizes.size() == 4 ? sizes[0] : 0;
  if (!has_shape(new_kv, ffi::F32, {p.num_tokens, p.cache.num_kv_heads, 2, p.cache.head_dim}) ||
      !has_shape(slots, ffi::S32, {p.num_tokens})) {
    return invalid("new_kv " + describe(new_kv) + " and slots " + describe(slots) +
                   " do not fit the cache " + describe(elements) +
                   ": needs float32 [T, K, 2, H] and int32 [T]");
  }
  // XLA has already copied a cache that it may not overwrite.
  bool is_in_place = written->untyped_data() == elements.untyped_data();
  if (p.cache.scales) {
    auto result = written_scales.get<ffi::AnyBuffer>(0);
    if (!result.has_value()) return invalid("int8 codes, and they alone, have scales");
    is_in_place = is_in_place && result.value()->untyped_data() == p.cache.scales;
  }
  if (!is_in_place) return invalid("results must be aliases of the cache");
  p.new_kv = data_of<float>(new_kv);
  p.slots = data_of<int32_t>(slots);
  loops().write(p);
  return ffi::Error::Success();
}

const Loops& portable_loops() { return attention_loops_portable; }
#if defined(__x86_64__)
const Loops& avx2_loops() { return attention_loops_avx2; }
const Loops& avx512_loops() { return attention_loops_avx512; }
const Loops& avx512bf16_loops() { return attention_avx512bf16(); }
const Loops& amx_loops() { return attention_amx(); }
#endif

const Loops& best_loops() { return attention_best(); }

}  // namespace

#define JAXINFER_HANDLERS(suffix, loops)                                                         \
  extern "C" JAXINFER_EXPORT XLA_FFI_Error* jaxinfer_attend_v2##suffix(XLA_FFI_CallFrame*);      \
  extern "C" JAXINFER_EXPORT XLA_FFI_Error* jaxinfer_write_kv_v1##suffix(XLA_FFI_CallFrame*);    \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_attend_v2##suffix, attend<loops>,                       \
                                ffi::Ffi::Bind()                                                 \
                                    .Ctx<ffi::ThreadPool>()                                      \
                                    .Arg<ffi::AnyBuffer>()                                       \
                                    .Arg<ffi::AnyBuffer>()                                       \
                                    .Arg<ffi::AnyBuffer>()                                       \
                                    .Arg<ffi::AnyBuffer>()                                       \
                                    .Arg<ffi::AnyBuffer>()                                       \
                                    .Arg<ffi::AnyBuffer>()                                       \
                                    .RemainingArgs()                                             \
                                    .Ret<ffi::AnyBuffer>()                                       \
                                    .Attr<int64_t>("group")                                      \
                                    .Attr<int64_t>("window")                                     \
                                    .Attr<float>("scale")                                        \
                                    .Attr<float>("soft_cap")                                     \
                                    .Attr<bool>("is_decode"));                                   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_write_kv_v1##suffix, write<loops>,                      \
                                ffi::Ffi::Bind()                                                 \
                                    .Arg<ffi::AnyBuffer>()                                       \
                                    .Arg<ffi::AnyBuffer>()                                       \
                                    .Arg<ffi::AnyBuffer>()                                       \
                                    .RemainingArgs()                                             \
                                    .Ret<ffi::AnyBuffer>()                                       \
                                    .RemainingRets())

JAXINFER_HANDLERS(, best_loops);
// For tests, and to measure one against another.
JAXINFER_HANDLERS(_portable, portable_loops);
#if defined(__x86_64__)
JAXINFER_HANDLERS(_avx2, avx2_loops);
JAXINFER_HANDLERS(_avx512, avx512_loops);
JAXINFER_HANDLERS(_avx512bf16, avx512bf16_loops);
JAXINFER_HANDLERS(_amx, amx_loops);
#endif
