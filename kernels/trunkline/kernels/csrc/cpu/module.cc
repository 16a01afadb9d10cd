// Exported functions that belong to no op: levels and contexts.

#include <system_error>

#include "common/exports.h"
#include "context.h"

namespace trunkline {
namespace {

// To be raised, here and in native.py, with every change to the functions that Python calls: a library that was
// not rebuilt after an update must be refused, not called with other arguments than it takes.
constexpr int64_t kInterfaceVersion = 8;

int64_t interface_version() { return kInterfaceVersion; }

int64_t cpu_level() { return static_cast<int64_t>(best_cpu_level()); }

int64_t cpu_context_new(int64_t level, int64_t threads) {
  if (!runs_here(level)) TVM_FFI_THROW(ValueError) << "level " << level << " does not run here";
  if (threads < 1 || threads > 1024) TVM_FFI_THROW(ValueError) << threads << " threads; allowed are 1 to 1024";
  try {
    return reinterpret_cast<int64_t>(new CpuContext(static_cast<CpuLevel>(level), static_cast<int>(threads)));
  } catch (const std::system_error& error) {
    TVM_FFI_THROW(RuntimeError) << threads << " threads cannot be started: " << error.what();
  }
  return 0;  // not reached
}

void cpu_context_delete(int64_t handle) { delete reinterpret_cast<CpuContext*>(handle); }

}  // namespace
}  // namespace trunkline

TRUNKLINE_EXPORT(interface_version, trunkline::interface_version)
TRUNKLINE_EXPORT(cpu_level, trunkline::cpu_level)
TRUNKLINE_EXPORT(cpu_runs, trunkline::runs_here)
TRUNKLINE_EXPORT(cpu_context_new, trunkline::cpu_context_new)
TRUNKLINE_EXPORT(cpu_context_delete, trunkline::cpu_context_delete)
