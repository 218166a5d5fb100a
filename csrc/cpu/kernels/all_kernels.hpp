// Every kernel, for the translation unit of one ISA. It defines OCTAVO_ISA first.
#pragma once

#include "attention.hpp"
#include "choice.hpp"
#include "gates.hpp"
#include "linear.hpp"
#include "moe.hpp"
#include "quantize_weights.hpp"
#include "rotary.hpp"
#include "rows.hpp"

namespace octavo::OCTAVO_ISA {

// In the order of OctavoOpKind, and what else is in a KernelSet.
#define OCTAVO_ALL_KERNELS                                                       \
  {embedding, rms_norm, add_rms_norm, linear, rotary_store_kv, attention,        \
   gated_activation, gather_rows, add, qk_norm, scale_logits, moe},              \
      OCTAVO_CHOICE_KERNELS, quantize_row

}  // namespace octavo::OCTAVO_ISA
