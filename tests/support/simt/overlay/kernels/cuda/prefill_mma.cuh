// What kernels/cuda/prefill_mma.cuh has, on the host. Products are there as soon as they are asked for; that registers
// are left alone until they are waited for is not played.
#pragma once

#include "kernels/cuda/memory.cuh"

#define KVQ_WARPGROUPS 1

namespace kvq::cuda {

inline constexpr std::uint32_t kAtomBytes = 1024;

inline std::uint32_t operand_at(std::uint32_t shared, std::uint32_t halves) {
  if (shared % 32 != 0 || shared >= 1 << 18 || halves % 16 != 0) std::abort();
  return shared / 16 | halves / 16 << 16;
}

// Element of an operand in rows of 128 bytes, chunks XORed with the row.
template <Dtype kType>
float operand_element(std::uint32_t operand, std::uint32_t row, std::uint32_t column) {
  const std::uint32_t start = operand % 0x10000 * 16, halves = operand / 0x10000 * 16;
  const std::uint32_t at = start + column / 64 * halves + row / 8 * kAtomBytes + row % 8 * 128 + column % 64 * 2;
  return element_value<kType>(*reinterpret_cast<const std::uint16_t*>(simt::shared_memory() + (at ^ (at >> 3 & 0x70))));
}

struct WarpgroupLane {
  float* c;
  const std::uint32_t* a;  // null: in shared memory
  std::uint32_t from_a, b;
  bool adds;
};

// C (64 x kColumns) += A (64 x 16) B; kByRow: B's depth is its rows.
template <Dtype kType, std::uint32_t kColumns, bool kByRow>
void warpgroup_product(WarpgroupLane mine) {
  simt::meet(
      kByRow ? "wgmma.values" : "wgmma.scores", &mine,
      [](void* const* all) {
        static float a[64][16], b[16][kColumns];
        const auto& first = *static_cast<const WarpgroupLane*>(all[0]);
        for (std::uint32_t k = 0; k < 16; ++k) {
          for (std::uint32_t n = 0; n < kColumns; ++n) {
            b[k][n] = kByRow ? operand_element<kType>(first.b, k, n) : operand_element<kType>(first.b, n, k);
          }
        }
        for (std::uint32_t lane = 0; lane < 128; ++lane) {
          const auto& it = *static_cast<const WarpgroupLane*>(all[lane]);
          if (it.b != first.b || it.from_a != first.from_a) std::abort();
          const std::uint32_t row = lane / 32 * 16 + lane % 32 / 4, column = lane % 4 * 2;
          for (std::uint32_t i = 0; i < 4; ++i) {
            const std::uint32_t r = row + 8 * (i & 1), k = column + 8 * (i >> 1);
            if (it.a != nullptr) {
              const float2 pair = unpack_pair<kType>(it.a[i]);
              a[r][k] = pair.x, a[r][k + 1] = pair.y;
            } else {
              a[r][k] = operand_element<kType>(it.from_a, r, k);
              a[r][k + 1] = operand_element<kType>(it.from_a, r, k + 1);
            }
          }
        }
        static float products[64][kColumns];
        std::memset(products, 0, sizeof products);
        for (std::uint32_t r = 0; r < 64; ++r) {
          for (std::uint32_t k = 0; k < 16; ++k) {
            for (std::uint32_t n = 0; n < kColumns; ++n) products[r][n] += a[r][k] * b[k][n];
          }
        }
        for (std::uint32_t lane = 0; lane < 128; ++lane) {
          const auto& it = *static_cast<const WarpgroupLane*>(all[lane]);
          for (std::uint32_t i = 0; i < kColumns / 2; ++i) {
            const float product =
                products[lane / 32 * 16 + lane % 32 / 4 + 8 * (i / 2 % 2)][i / 4 * 8 + lane % 4 * 2 + i % 2];
            it.c[i] = it.adds ? it.c[i] + product : product;
          }
        }
      },
      128);
}

template <Dtype kType>
void warpgroup_mma(float (&c)[32], std::uint32_t a, std::uint32_t b, bool adds) {
  warpgroup_product<kType, 64, false>({c, nullptr, a, b, adds});
}
template <Dtype kType, std::uint32_t kCount>
void warpgroup_mma(float (&c)[kCount], const std::uint32_t (&a)[4], std::uint32_t b) {
  warpgroup_product<kType, 2 * kCount, true>({c, a, 0, b, true});
}

inline void products_begin() {}
inline void products_commit() {}
template <int kLeft>
void products_wait() {}
template <std::uint32_t kCount>
void hold(float (&)[kCount]) {}

inline void keep(std::uint32_t&) {}
inline void store_shared1(std::uint32_t at, std::uint32_t v) { std::memcpy(simt::shared_memory() + at, &v, sizeof v); }
inline void store_shared_half(std::uint32_t at, std::uint16_t v) {
  std::memcpy(simt::shared_memory() + at, &v, sizeof v);
}
inline void fence_writes() {}
template <std::uint32_t kRegisters, bool kMore>
void take_registers() {
  simt::meet(
      "setmaxnreg", nullptr, [](void* const*) {}, 128);
}

template <std::uint32_t kMask, std::uint32_t kMagic>
std::uint32_t with_magic(std::uint32_t a) {
  return (a & kMask) | kMagic;
}
template <Dtype kType>
std::uint32_t fma_pairs(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const float2 x = unpack_pair<kType>(a), y = unpack_pair<kType>(b), z = unpack_pair<kType>(c);
  // Products are exact in double precision, and what its own rounding adds is far below that of 16 bits.
  return pack_pair<kType>(static_cast<float>(double{x.x} * y.x + z.x), static_cast<float>(double{x.y} * y.y + z.y));
}
inline std::uint32_t subtract_pairs(std::uint32_t a, std::uint32_t b) {
  return fma_pairs<Dtype::fp16>(b, 0xbc00bc00u, a);
}
inline bool any_reaches(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t limit) {
  const float2 x = unpack_pair<Dtype::fp16>(fma_pairs<Dtype::fp16>(a, b, c)), y = unpack_pair<Dtype::fp16>(limit);
  return x.x >= y.x || x.y >= y.y;
}
inline std::uint32_t clamp_pair(std::uint32_t a) {
  const float2 x = unpack_pair<Dtype::fp16>(a);
  return pack_pair<Dtype::fp16>(fmaxf(-65504, fminf(65504, x.x)), fmaxf(-65504, fminf(65504, x.y)));
}

template <bool kTransposed>
void store_matrices(std::uint32_t at, const Fragment& f) {
  struct Store {
    std::uint32_t at;
    const Fragment* f;
  } mine{at, &f};
  simt::meet(kTransposed ? "stmatrix.trans" : "stmatrix", &mine, [](void* const* all) {
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      for (std::uint32_t i = 0; i < 4; ++i) {
        const std::uint32_t word = static_cast<const Store*>(all[lane])->f->r[i], g = lane / 4, t = lane % 4 * 2;
        for (std::uint32_t e = 0; e < 2; ++e) {
          const std::uint32_t row = kTransposed ? t + e : g, column = kTransposed ? g : t + e;
          store_shared_half(static_cast<const Store*>(all[8 * i + row])->at + 2 * column,
                            static_cast<std::uint16_t>(word >> 16 * e));
        }
      }
    }
  });
}

inline void copy16_or_zero(std::uint32_t to, std::uint64_t from, std::uint32_t bytes) {
  simt::copy_own(to, from, bytes);
}
inline void commit_copies() { simt::commit_own(); }
template <std::uint32_t kLeft>
void wait_copies() {
  simt::wait_own(kLeft);
}
inline bool barrier_is_over(std::uint32_t, std::uint32_t) { return false; }  // a look that comes too early
inline void group_barrier(std::uint32_t, std::uint32_t threads) {
  simt::meet(
      "group barrier", nullptr, [](void* const*) {}, threads);
}

inline bool any_of_group(std::uint32_t, std::uint32_t threads, bool x) {
  bool any = x;
  simt::meet(
      "group vote", &any,
      [](void* const* all) {
        bool some = false;
        for (std::uint32_t lane = 0; lane < 128; ++lane) some |= *static_cast<const bool*>(all[lane]);
        for (std::uint32_t lane = 0; lane < 128; ++lane) *static_cast<bool*>(all[lane]) = some;
      },
      threads);
  return any;
}
inline std::uint32_t of_warp(std::uint32_t x) { return __shfl_sync(kAllLanes, x, 0); }

template <std::uint32_t kStages>
struct Turn {
  std::uint32_t stage = 0, parity = 0;
  void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  Turn after() const {
    Turn next = *this;
    next.next();
    return next;
  }
};

}  // namespace kvq::cuda
