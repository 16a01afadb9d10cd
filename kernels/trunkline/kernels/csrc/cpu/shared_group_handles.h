// Groups as Python holds them, by handle, and the kinds of their errors.
#pragma once

#include <tvm/ffi/error.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <system_error>

#include "cpu/shared_group.h"

namespace trunkline {

// Shared, so that a group which another thread closes outlives the call. A ValueError if it is closed.
std::shared_ptr<SharedGroup> group_of(int64_t handle);

// Calls `body`; its errors become those that `trunkline/kernels/shared_group.py` registers.
template <class Body>
auto translated(Body&& body) {
  try {
    return body();
  } catch (const PeerLost& error) {
    // Not TVM_FFI_THROW: its first backtrace reads the debug information of all libraries, half a second and more
    // of the second within which a rank has to leave.
    throw tvm::ffi::Error("PeerGoneError", error.what(), "");
  } catch (const CallMismatch& error) {
    throw tvm::ffi::Error("CollectiveMismatchError", error.what(), "");
  } catch (const std::system_error& error) {
    TVM_FFI_THROW(GroupFileError) << error.what();
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  } catch (const std::logic_error& error) {
    TVM_FFI_THROW(RuntimeError) << error.what();
  }
}

}  // namespace trunkline
