// The kernels in portable C++: the reference every other build must match bit for bit.
#define OCTAVO_ISA scalar
#include "kernels/all_kernels.hpp"

namespace octavo {

const KernelSet& scalar_kernels() {
  using namespace scalar;
  static constexpr KernelSet kernels = {"scalar", OCTAVO_ALL_KERNELS};
  return kernels;
}

}  // namespace octavo
