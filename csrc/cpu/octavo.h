/* The C ABI between Python (octavo/backends/native/library.py) and the CPU kernels.
 *
 * Rule: whoever changes a struct, an enum or a signature here raises OCTAVO_ABI_VERSION and mirrors
 * the change in library.py. Pointers are borrowed: the library owns no tensor.
 */
#pragma once

#include <stdint.h>

#define OCTAVO_ABI_VERSION 4
#define OCTAVO_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum OctavoIsa {
  OCTAVO_ISA_AUTO,
  OCTAVO_ISA_SCALAR,
  OCTAVO_ISA_AVX2,
  OCTAVO_ISA_AVX512,
  OCTAVO_ISA_NEON,
  OCTAVO_ISA_NEON_DOT
};

/* How a weight lies in memory (layouts.hpp). */
enum OctavoFormat {
  OCTAVO_FORMAT_F32,
  OCTAVO_FORMAT_Q4M,
  OCTAVO_FORMAT_Q8,
  OCTAVO_FORMAT_F16,
  OCTAVO_FORMAT_BF16,
  OCTAVO_FORMAT_Q4,
  OCTAVO_FORMAT_Q8G16,
  OCTAVO_NUM_FORMATS
};

enum OctavoDType { OCTAVO_DTYPE_F32, OCTAVO_DTYPE_F16, OCTAVO_DTYPE_BF16, OCTAVO_NUM_DTYPES };

/* Of gated activations: their contracts are in octavo/program/ir.py. */
enum OctavoActivation {
  OCTAVO_ACTIVATION_SILU,
  OCTAVO_ACTIVATION_GELU_TANH,
  OCTAVO_ACTIVATION_CLAMPED_SWIGLU,
  OCTAVO_NUM_ACTIVATIONS
};

/* Which size of the step counts an op's rows. */
enum OctavoRows { OCTAVO_ROWS_TOKENS, OCTAVO_ROWS_SEQS, OCTAVO_ROWS_SAMPLED };

enum OctavoOpKind {
  OCTAVO_OP_EMBEDDING,
  OCTAVO_OP_RMS_NORM,
  OCTAVO_OP_ADD_RMS_NORM,
  OCTAVO_OP_LINEAR,
  OCTAVO_OP_ROTARY_STORE_KV,
  OCTAVO_OP_ATTENTION,
  OCTAVO_OP_GATED_ACTIVATION,
  OCTAVO_OP_GATHER_ROWS,
  OCTAVO_OP_ADD,
  OCTAVO_OP_QK_NORM,
  OCTAVO_OP_SCALE_LOGITS,
  OCTAVO_OP_MOE,
  OCTAVO_NUM_OP_KINDS
};

/* The experts of a moe: weights packed like linear's, an expert's rows after the other's. */
typedef struct OctavoExperts {
  int32_t num_experts;    /* E */
  int32_t top_k;          /* experts of a token */
  int32_t normalize;      /* 1 if a token's shares are made to sum to 1 */
  int32_t width;          /* F */
  int32_t router_format;  /* OctavoFormat of each weight */
  int32_t gate_up_format;
  int32_t down_format;
  const void* router;     /* [E, H] */
  const void* gate_up;    /* [E 2 F, H] */
  const void* down;       /* [E H, F] */
  const float* router_bias;  /* [E], or NULL; likewise the following */
  const float* gate_up_bias; /* [E 2 F] */
  const float* down_bias;    /* [E H] */
} OctavoExperts;

/* One op of a bound program. Fields that a kind does not use are zero. */
typedef struct OctavoOp {
  int32_t kind;          /* OctavoOpKind */
  int32_t rows;          /* OctavoRows of the output */
  int32_t format;        /* OctavoFormat of `weight` */
  int32_t kv_dtype;      /* OctavoDType of `kv` */
  int32_t in_width;      /* columns of x */
  int32_t out_width;     /* columns of out */
  int32_t table_rows;    /* embedding: vocabulary; rotary: rows of the table */
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t rotary_dim;
  int32_t kv_group;      /* whose block table and slot mapping */
  int32_t window;        /* attention: positions seen, 0 for all */
  int32_t activation;    /* OctavoActivation of gated_activation and moe */
  int32_t norm_together; /* qk_norm: 1 if all heads of a token are normalised as one */
  float scale;           /* embedding, attention, scale_logits; add, add_rms_norm: of x */
  float softcap;         /* attention, scale_logits: 0 for none */
  float eps;             /* norms */
  int32_t activation_bits; /* linear, moe on q4m and q4: 8 or 16 */
  int64_t scratch_nbytes;
  const float* x;        /* [rows, in_width] */
  const float* residual; /* add, add_rms_norm */
  const void* weight;    /* packed weight, norm weight (qk_norm: of q), or rope table */
  const float* k_weight; /* qk_norm */
  const float* sinks;    /* attention: [q_heads], or NULL */
  const float* bias;     /* linear, or NULL */
  float* out;            /* [rows, out_width] */
  float* out_sum;        /* add_rms_norm; may be residual */
  void* kv;              /* pages of the layer's storage: [num_blocks][page] */
  void* scratch;
  const OctavoExperts* experts; /* moe */
} OctavoOp;

/* What a step reads: StepInputs of octavo/backends/base.py. */
typedef struct OctavoInputs {
  const int32_t* token_ids;    /* [max_tokens] */
  const int32_t* positions;    /* [max_tokens] */
  const int32_t* rope_rows;    /* [max_tokens]: rows of rotary's table */
  const int32_t* cu_q;         /* [max_seqs + 1] */
  const int32_t* seq_lens;     /* [max_seqs] */
  const int32_t* slot_mapping; /* [num_groups][max_tokens] */
  const int32_t* block_table;  /* [num_groups][max_seqs][max_blocks] */
  const int32_t* sampled_rows; /* [max_sampled] */
} OctavoInputs;

typedef struct OctavoLimits {
  int32_t max_tokens;
  int32_t max_seqs;
  int32_t max_sampled;
  int32_t max_blocks; /* width of a block table */
  int32_t num_groups;
  int32_t num_blocks; /* KV blocks a table or a slot may name */
} OctavoLimits;

enum OctavoCode { OCTAVO_OK, OCTAVO_BAD_PROGRAM, OCTAVO_BAD_INPUT };

/* Why a call was refused. Nothing has been written when code is not OCTAVO_OK. */
typedef struct OctavoStatus {
  int32_t code;
  int32_t op;  /* index into the ops, -1 if the step itself is at fault */
  int32_t row; /* row of the input at fault, or -1 */
  char cause[180];
} OctavoStatus;

typedef struct OctavoContext OctavoContext;

/* A row of logits to choose a token from: octavo/sampling/choice.py. */
typedef struct OctavoChoice {
  const float* logits;
  uint64_t seed;
  double temperature; /* 0 takes the likeliest token, whatever the fields below say */
  double top_p;       /* 1 keeps all */
  double log_min_p;   /* -infinity keeps all */
  int32_t top_k;      /* 0 keeps all */
  int32_t position;   /* of the new token */
  int32_t token_id;   /* the result; ~id where its logit is not finite: the row is not to be sampled from */
} OctavoChoice;

/* Rows of K weights to pack. */
typedef struct OctavoPackJob {
  int32_t format;           /* OctavoFormat; pack.cpp says what `raw` is accordingly */
  int32_t width;            /* K */
  int64_t num_rows;         /* rows to write */
  int64_t first_row;        /* row of the packed weight the first one becomes */
  const uint8_t* raw;
  const int32_t* row_order; /* output row i is raw row row_order[i]; NULL keeps the order */
  void* packed;             /* the whole packed weight, 64-byte aligned, zeroed before its first part */
} OctavoPackJob;

/* Rows of K f32 weights to quantise. All are finite, and within the reach of f16 scales. */
typedef struct OctavoQuantizeJob {
  int32_t format;      /* Q4, Q4M or Q8 */
  int32_t width;       /* K, a multiple of 32 */
  int64_t num_rows;
  const float* values; /* [num_rows, width] */
  uint8_t* raw;        /* what octavo_pack reads of this format, [num_rows] */
} OctavoQuantizeJob;

OCTAVO_API int32_t octavo_version(void);

/* A context with its thread team (the caller of octavo_run is thread 0 of it). NULL if this CPU
 * lacks the ISA asked for or no thread could be started. */
OCTAVO_API OctavoContext* octavo_create(int32_t isa, int32_t num_threads);
OCTAVO_API void octavo_destroy(OctavoContext* context);
OCTAVO_API const char* octavo_isa(const OctavoContext* context);

OCTAVO_API void octavo_pack(OctavoContext* context, const OctavoPackJob* job);
OCTAVO_API void octavo_quantize(OctavoContext* context, const OctavoQuantizeJob* job);

/* Keep a copy of the ops; everything they point at must outlive the context or the next bind. */
OCTAVO_API void octavo_bind(OctavoContext* context, const OctavoOp* ops, int32_t num_ops,
                            const OctavoInputs* inputs, const OctavoLimits* limits,
                            OctavoStatus* status);

/* Run all ops on a step of this size. One thread at a time calls into a context. */
OCTAVO_API void octavo_run(OctavoContext* context, int32_t num_tokens, int32_t num_seqs,
                           int32_t num_sampled, OctavoStatus* status);

/* Choose a token for each row; rows have `width` logits, at least 1. scratch: aligned for doubles, as
 * many bytes as octavo_choice_scratch says. */
OCTAVO_API void octavo_choose(OctavoContext* context, OctavoChoice* choices, int32_t num_choices,
                              int32_t width, void* scratch);
OCTAVO_API int64_t octavo_choice_scratch(const OctavoContext* context, int32_t width);

#ifdef __cplusplus
}
#endif
