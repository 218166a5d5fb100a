// The kernels on AVX2, FMA and F16C. Compiled with those flags, called only where the CPU has them.
#define OCTAVO_ISA avx2
#define OCTAVO_KERNELS_AVX2
#include "kernels/all_kernels.hpp"

namespace octavo {

const KernelSet& avx2_kernels() {
  using namespace avx2;
  static constexpr KernelSet kernels = {"avx2", OCTAVO_ALL_KERNELS};
  return kernels;
}

}  // namespace octavo
