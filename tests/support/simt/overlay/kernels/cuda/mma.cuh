// What kernels/cuda/mma.cuh has, on the host: the same fragments, products summed in double precision.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/half.h"
#include "kvq/types.h"

namespace kvq::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

struct Fragment {
  std::uint32_t r[4];
};

inline float half_bits_to_float(std::uint16_t h) {
  static const std::vector<float> values = [] {
    std::vector<float> all(65536);
    for (std::uint32_t i = 0; i < all.size(); ++i) all[i] = half_to_float(static_cast<std::uint16_t>(i));
    return all;
  }();
  return values[h];
}

template <Dtype kType>
float element_value(std::uint16_t bits) {
  return kType == Dtype::fp16 ? half_bits_to_float(bits) : __uint_as_float(std::uint32_t{bits} << 16);
}

template <Dtype kType>
float2 unpack_pair(std::uint32_t w) {
  return {element_value<kType>(static_cast<std::uint16_t>(w)),
          element_value<kType>(static_cast<std::uint16_t>(w >> 16))};
}

template <Dtype kType>
std::uint32_t pack_pair(float low, float high) {
  if constexpr (kType == Dtype::fp16) {
    return simt_cast<std::uint16_t>(__float2half_rn(low)) |
           std::uint32_t{simt_cast<std::uint16_t>(__float2half_rn(high))} << 16;
  } else {
    return simt_cast<std::uint16_t>(__float2bfloat16_rn(low)) |
           std::uint32_t{simt_cast<std::uint16_t>(__float2bfloat16_rn(high))} << 16;
  }
}

template <Dtype kType>
void mma(float (&c)[4], const Fragment& a, std::uint32_t b0, std::uint32_t b1) {
  struct Operands {
    float* c;
    std::uint32_t a[4], b[2];
  } mine{c, {a.r[0], a.r[1], a.r[2], a.r[3]}, {b0, b1}};
  simt::meet("mma", &mine, [](void* const* all) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const auto* it = static_cast<const Operands*>(all[lane]);
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        const float2 v = unpack_pair<kType>(it->a[i]);
        a[g + 8 * (i & 1)][2 * t + 8 * (i >> 1)] = v.x;
        a[g + 8 * (i & 1)][2 * t + 1 + 8 * (i >> 1)] = v.y;
      }
      for (int i = 0; i < 2; ++i) {
        const float2 v = unpack_pair<kType>(it->b[i]);
        b[2 * t + 8 * i][g] = v.x;
        b[2 * t + 1 + 8 * i][g] = v.y;
      }
    }
    double products[16][8] = {};
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; ++k) {
        for (int column = 0; column < 8; ++column) products[row][column] += double{a[row][k]} * b[k][column];
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      float* const c = static_cast<const Operands*>(all[lane])->c;
      for (int i = 0; i < 4; ++i) {
        c[i] = static_cast<float>(c[i] + products[lane / 4 + 8 * (i >> 1)][lane % 4 * 2 + (i & 1)]);
      }
    }
  });
}

inline std::uint32_t shared_address(const void* p) { return simt::shared_address(p); }

template <typename T>
T load_shared(std::uint32_t at) {
  T v;
  if (at % sizeof v != 0) std::abort();
  std::memcpy(&v, simt::shared_memory() + at, sizeof v);
  return v;
}
inline uint4 load_shared4(std::uint32_t at) { return load_shared<uint4>(at); }
inline uint2 load_shared2(std::uint32_t at) { return load_shared<uint2>(at); }
inline std::uint32_t load_shared1(std::uint32_t at) { return load_shared<std::uint32_t>(at); }
inline std::uint16_t load_shared_half(std::uint32_t at) { return load_shared<std::uint16_t>(at); }
inline void store_shared4(std::uint32_t at, uint4 v) { std::memcpy(simt::shared_memory() + at, &v, sizeof v); }

template <bool kTransposed>
Fragment load_matrices(std::uint32_t at) {
  struct Load {
    std::uint32_t at;
    Fragment f;
  } mine{at, {}};
  simt::meet(kTransposed ? "ldmatrix.trans" : "ldmatrix", &mine, [](void* const* all) {
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      for (std::uint32_t i = 0; i < 4; ++i) {
        const auto element = [&](std::uint32_t row, std::uint32_t column) {
          return load_shared_half(static_cast<Load*>(all[8 * i + row])->at + 2 * column);
        };
        const std::uint32_t g = lane / 4, t = lane % 4 * 2;
        const std::uint32_t low = kTransposed ? element(t, g) : element(g, t);
        const std::uint32_t high = kTransposed ? element(t + 1, g) : element(g, t + 1);
        static_cast<Load*>(all[lane])->f.r[i] = low | high << 16;
      }
    }
  });
  return mine.f;
}

inline std::uint32_t transpose(std::uint32_t a) {
  struct Matrix {
    std::uint32_t from, to;
  } mine{a, 0};
  simt::meet("movmatrix", &mine, [](void* const* all) {
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      const auto element = [&](std::uint32_t row, std::uint32_t column) {
        return static_cast<Matrix*>(all[4 * row + column / 2])->from >> (column % 2 * 16) & 0xffff;
      };
      static_cast<Matrix*>(all[lane])->to = element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
    }
  });
  return mine.to;
}

inline float exp2_fast(float x) { return exp2f(x); }

inline std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  const float2 x = unpack_pair<Dtype::fp16>(a), y = unpack_pair<Dtype::fp16>(b);
  return pack_pair<Dtype::fp16>(x.x * y.x, x.y * y.y);
}

}  // namespace kvq::cuda
