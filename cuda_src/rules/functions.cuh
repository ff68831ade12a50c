// This header has the operations of users' own rules with NumPy's meaning: integers wrap, // and % round down as
// Python's do, NaN passes minimum and maximum. cuflash/rules/to_cuda.py writes calls of them; T is the result's type.
#include "../params.cuh"

namespace rule {

constexpr bool IS_DOUBLE = sizeof(Accum) == 8;

template <class T>
struct Is {
  static constexpr bool BOOL = T(2) == T(1);
  static constexpr bool FLOAT = T(0.5) != T(0) && !BOOL;
};

// Unsigned numbers of at least 32 bits wrap; signed ones must not overflow.
template <class T>
DEVICE auto wrapping(T x) {
  if constexpr (sizeof(T) > 4) {
    return static_cast<u64>(x);
  } else {
    return static_cast<u32>(x);
  }
}

template <class T>
DEVICE T add(T a, T b) {
  return static_cast<T>(wrapping(a) + wrapping(b));
}
template <class T>
DEVICE T subtract(T a, T b) {
  return static_cast<T>(wrapping(a) - wrapping(b));
}
template <class T>
DEVICE T multiply(T a, T b) {
  return static_cast<T>(wrapping(a) * wrapping(b));
}
template <class T>
DEVICE T negative(T a) {
  return static_cast<T>(0 - wrapping(a));
}

// remainder() has the sign of b; of integers it is 0 where b is.
template <class T>
DEVICE T remainder(T a, T b) {
  if constexpr (Is<T>::FLOAT) {
    T x;
    if constexpr (IS_DOUBLE) {
      x = fmod(a, b);
    } else {
      x = fmodf(a, b);
    }
    if (x == 0) return b < 0 ? -T(0) : T(0);
    return (x < 0) != (b < 0) ? x + b : x;
  } else {
    if (b == 0 || b == static_cast<T>(-1)) return T(-1) > T(0) && b != 0 ? static_cast<T>(a % b) : T(0);
    const T x = static_cast<T>(a % b);
    return x != 0 && (x < 0) != (b < 0) ? static_cast<T>(x + b) : x;
  }
}

template <class T>
DEVICE T floor(T x) {
  if constexpr (IS_DOUBLE) {
    return ::floor(x);
  } else {
    return floorf(x);
  }
}

// floor_divide() rounds down; of integers it is 0 where b is.
template <class T>
DEVICE T floor_divide(T a, T b) {
  if constexpr (Is<T>::FLOAT) {
    if (b == 0) return a / b;
    const T x = (a - remainder(a, b)) / b;
    const T low = floor(x);
    return x - low > T(0.5) ? low + 1 : low;
  } else {
    if (b == 0) return T(0);
    if (T(-1) < T(0) && b == static_cast<T>(-1)) return negative(a);
    const T x = static_cast<T>(a / b);
    return static_cast<T>(a % b) != 0 && (a < 0) != (b < 0) ? static_cast<T>(x - 1) : x;
  }
}

template <class T>
DEVICE T minimum(T a, T b) {
  return a <= b || a != a ? a : b;
}
template <class T>
DEVICE T maximum(T a, T b) {
  return a >= b || a != a ? a : b;
}
template <class T>
DEVICE T sign(T x) {
  if (x != x) return x;
  return x > 0 ? T(1) : x < 0 ? static_cast<T>(-1) : T(0);
}
template <class T>
DEVICE T absolute(T x) {
  if constexpr (Is<T>::FLOAT) {
    return x < 0 ? -x : x == 0 ? T(0) : x;
  } else {
    return x < 0 ? negative(x) : x;
  }
}

#define RULE_FUNCTION(name, of_double, of_float) \
  template <class T>                             \
  DEVICE T name(T x) {                           \
    if constexpr (IS_DOUBLE) {                   \
      return ::of_double(x);                     \
    } else {                                     \
      return ::of_float(x);                      \
    }                                            \
  }
RULE_FUNCTION(ceil, ceil, ceilf)
RULE_FUNCTION(exp, exp, expf)
RULE_FUNCTION(exp2, exp2, exp2f)
RULE_FUNCTION(log, log, logf)
RULE_FUNCTION(log2, log2, log2f)
RULE_FUNCTION(sqrt, sqrt, sqrtf)
RULE_FUNCTION(tanh, tanh, tanhf)
RULE_FUNCTION(sin, sin, sinf)
RULE_FUNCTION(cos, cos, cosf)
#undef RULE_FUNCTION

template <class T>
DEVICE T power(T x, T exponent) {
  if constexpr (IS_DOUBLE) {
    return ::pow(x, exponent);
  } else {
    return ::powf(x, exponent);
  }
}

// clamped() is an index of an axis of `size` elements, which has one at least. For the most common indices the last
// element is found outside of the loops, and two instructions are left in them.
template <class T>
DEVICE i64 clamped(T index, i64 size) {
  if constexpr (sizeof(T) == sizeof(int) && T(-1) < T(0)) {
    const int last = static_cast<int>(size <= 0x7fffffff ? size - 1 : 0x7fffffff);
    return larger(smaller(static_cast<int>(index), last), 0);
  }
  if (index < 0) return 0;
  return static_cast<u64>(index) < static_cast<u64>(size) ? static_cast<i64>(index) : size - 1;
}

// element() reads an element of an operand. Bools are bytes.
template <class T, class E>
DEVICE T element(const E* data, i64 place) {
  if constexpr (Is<T>::BOOL) {
    return reinterpret_cast<const u8*>(data)[place] != 0;
  } else if constexpr (Is<T>::FLOAT) {
    return static_cast<T>(to_accum(data[place]));
  } else {
    return data[place];
  }
}

}  // namespace rule
