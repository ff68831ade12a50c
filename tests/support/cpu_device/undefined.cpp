// Code compiled with -fsanitize=undefined calls these: each defect ends the launch with its place. (The compiler's own
// runtime would print and go on, or end the process.)
#include <cstdint>

#include "runtime.h"

namespace {

// Every description that the compiler passes begins with this.
struct Source {
  const char* file;
  uint32_t line, column;
};

struct TypeMismatch {
  Source source;
  const void* type;
  unsigned char log_alignment, kind;
};

cpu_device::Where where(const Source* source) {
  return cpu_device::Where(source && source->file ? source->file : "?", source ? source->line : 0);
}

}  // namespace

extern "C" void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uintptr_t pointer) {
  const uintptr_t alignment = uintptr_t(1) << data->log_alignment;
  if (pointer == 0) cpu_device::fail(where(&data->source), "undefined: a null pointer is used");
  if (pointer % alignment)
    cpu_device::fail(where(&data->source), "undefined: the address %p is misaligned, this access needs %zu bytes",
                     reinterpret_cast<void*>(pointer), size_t(alignment));
  cpu_device::fail(where(&data->source), "undefined: too little room for an object of this type");
}

#define CPU_DEVICE_UNDEFINED(name, what, ...)                            \
  extern "C" void __ubsan_handle_##name(Source* source, ##__VA_ARGS__) { \
    cpu_device::fail(where(source), "undefined: " what);                 \
  }
using Value = uintptr_t;
CPU_DEVICE_UNDEFINED(out_of_bounds, "an index beyond the array", Value)
CPU_DEVICE_UNDEFINED(shift_out_of_bounds, "a shift by a negative or too large amount", Value, Value)
CPU_DEVICE_UNDEFINED(add_overflow, "an integer overflow in +", Value, Value)
CPU_DEVICE_UNDEFINED(sub_overflow, "an integer overflow in -", Value, Value)
CPU_DEVICE_UNDEFINED(mul_overflow, "an integer overflow in *", Value, Value)
CPU_DEVICE_UNDEFINED(negate_overflow, "an integer overflow in unary -", Value)
CPU_DEVICE_UNDEFINED(divrem_overflow, "a division by zero, or one that overflows", Value, Value)
CPU_DEVICE_UNDEFINED(pointer_overflow, "a pointer that leaves its object or starts from null", Value, Value)
CPU_DEVICE_UNDEFINED(load_invalid_value, "a bool or enum that holds none of its values", Value)
CPU_DEVICE_UNDEFINED(float_cast_overflow, "a floating-point value that the integer cannot hold", Value)
CPU_DEVICE_UNDEFINED(vla_bound_not_positive, "an array of no elements", Value)
CPU_DEVICE_UNDEFINED(builtin_unreachable, "the end of unreachable code")
CPU_DEVICE_UNDEFINED(missing_return, "a function that returns no value")
CPU_DEVICE_UNDEFINED(nonnull_arg, "a null argument")
CPU_DEVICE_UNDEFINED(invalid_builtin, "a zero argument of __builtin_clz or __builtin_ctz")
