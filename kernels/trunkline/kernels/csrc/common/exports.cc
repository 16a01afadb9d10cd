#include "common/exports.h"

#include <tvm/ffi/error.h>

namespace trunkline {

void throw_wrong_count(size_t expected, int32_t count, const char* name, const std::string& signature) {
  TVM_FFI_THROW(TypeError) << "Mismatched number of arguments when calling: `" << name << signature
                           << "`. Expected " << expected << " but got " << count << " arguments";
}

int pass_exception_on() noexcept {
  TVM_FFI_SAFE_CALL_BEGIN();
  throw;
  TVM_FFI_SAFE_CALL_END();
}

}  // namespace trunkline
