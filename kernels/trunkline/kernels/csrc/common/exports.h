// Functions that Python calls: `TRUNKLINE_EXPORT(name, function)` in place of tvm-ffi's own macro, with the same
// interface and the same errors.
//
// That macro expands, for each argument of each function, all that makes the message about a wrong type, which is most
// of what there would be to compile outside of the kernels. Here it is there once for each type.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <cstddef>
#include <exception>
#include <string>
#include <type_traits>
#include <utility>

namespace trunkline {

template <class T>
[[gnu::noinline]] T exported_argument(const tvm::ffi::AnyView* arguments, int32_t index, const char* name,
                                      tvm::ffi::detail::FGetFuncSignature signature) {
  if (auto value = arguments[index].try_cast<T>()) return *std::move(value);
  const std::string called = name;
  return tvm::ffi::detail::ArgValueWithContext<T>(arguments, index, &called, signature);  // throws
}

[[noreturn]] void throw_wrong_count(size_t expected, int32_t count, const char* name,
                                    const std::string& signature);

// To be called while an exception is handled, which becomes Python's. Returns -1.
int pass_exception_on() noexcept;

template <auto kFunction, class Result, class... Arguments, size_t... kIndex>
void call_exported(Result (*)(Arguments...), std::index_sequence<kIndex...>, const char* name,
                   const tvm::ffi::AnyView* arguments, int32_t count, tvm::ffi::Any* result) {
  constexpr auto kSignature = tvm::ffi::detail::FuncFunctorImpl<Result, Arguments...>::Sig;
  if (count != static_cast<int32_t>(sizeof...(Arguments))) {
    throw_wrong_count(sizeof...(Arguments), count, name, kSignature());
  }
  if constexpr (std::is_void_v<Result>) {
    kFunction(exported_argument<std::remove_cvref_t<Arguments>>(arguments, kIndex, name, kSignature)...);
  } else {
    *result = kFunction(exported_argument<std::remove_cvref_t<Arguments>>(arguments, kIndex, name, kSignature)...);
  }
}

template <auto kFunction, class Result, class... Arguments>
int run_exported(Result (*function)(Arguments...), const char* name, const TVMFFIAny* arguments, int32_t count,
                 TVMFFIAny* result) noexcept {
  try {
    call_exported<kFunction>(function, std::index_sequence_for<Arguments...>{}, name,
                             reinterpret_cast<const tvm::ffi::AnyView*>(arguments), count,
                             reinterpret_cast<tvm::ffi::Any*>(result));
    return 0;
  } catch (...) {
    return pass_exception_on();
  }
}

}  // namespace trunkline

#define TRUNKLINE_EXPORT(name, function)                                                               \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* arguments, int32_t count, \
                                                     TVMFFIAny* result) {                              \
    return ::trunkline::run_exported<function>(function, #name, arguments, count, result);             \
  }
