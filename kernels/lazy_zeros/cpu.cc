// The jax.ffi handler of zeros that take memory only where they are written: whole pages of a
// result are given back to the system, which fills them with zeros when they are touched.
//
// The name carries a version: raise it whenever operands, attributes or results change.

#include <cstdint>
#include <cstring>

#include "../cpp/handler.h"
#include "xla/ffi/api/ffi.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

namespace ffi = xla::ffi;

// Whether the pages [begin, end) are zeros now. Only memory of the process's own is when it is
// taken again, as all is that XLA allocates; a byte in it tells.
bool give_back(char* begin, char* end) {
#if defined(__linux__)
  volatile char* const first = begin;
  *first = 1;
  return madvise(begin, static_cast<size_t>(end - begin), MADV_DONTNEED) == 0 && *first == 0;
#else
  return false;
#endif
}

uintptr_t page_size() {
#if defined(__linux__)
  return static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
#else
  return 4096;
#endif
}

ffi::Error make_zeros(ffi::Result<ffi::AnyBuffer> result) {
  auto* const first = static_cast<char*>(result->untyped_data());
  char* const last = first + result->size_bytes();
  const uintptr_t page = page_size();
  const auto at = [](const char* p) { return reinterpret_cast<uintptr_t>(p); };
  char* const begin = first + (page - at(first) % page) % page;
  char* const end = last - at(last) % page;
  if (begin >= end || !give_back(begin, end)) {
    std::memset(first, 0, result->size_bytes());
  } else {
    std::memset(first, 0, static_cast<size_t>(begin - first));
    std::memset(end, 0, static_cast<size_t>(last - end));
  }
  return ffi::Error::Success();
}

}  // namespace

extern "C" JAXINFER_EXPORT XLA_FFI_Error* jaxinfer_lazy_zeros_v1(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_lazy_zeros_v1, make_zeros,
                              ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
