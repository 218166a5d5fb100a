// The kernels on AVX-512 with VNNI, beyond AVX2. Compiled with those flags, called only where the CPU
// has them.
#define OCTAVO_ISA avx512
#define OCTAVO_KERNELS_AVX512
#include "kernels/all_kernels.hpp"

namespace octavo {

const KernelSet& avx512_kernels() {
  using namespace avx512;
  static constexpr KernelSet kernels = {"avx512", OCTAVO_ALL_KERNELS};
  return kernels;
}

}  // namespace octavo
