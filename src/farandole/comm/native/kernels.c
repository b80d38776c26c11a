/* Loops over gradients that read and write each number once.

   Every result has the bits that the eager code of the codecs and of the shared memory gives: ranks with and
   without these loops work together. So there is no fused multiply-add and no reordering of sums, and rounding
   is to the nearest even number. The one freedom left is which NaN a NaN is.

   A packed piece is laid out as [scales][numbers], see codecs/packers.py. All counts are whole blocks. */

#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || __FLT_EVAL_METHOD__ != 0
#error "float arithmetic must be that of IEEE 754, in its own precision"
#endif

#if !defined(CLONES) && defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
/* The processor's own choice, made when the library is loaded. */
#define CLONES __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef CLONES
#define CLONES
#endif
#define EXPORT CLONES __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

typedef union { float number; uint32_t bits; } word;

INLINE uint32_t bits_of(float number) { word w; w.number = number; return w.bits; }
INLINE float number_of(uint32_t bits) { word w; w.bits = bits; return w.number; }

#define INFINITY_BITS 0x7f800000u
/* Added to a number of at most 2^22 it leaves the nearest whole number, even at ties, in the low bits. */
#define ROUNDER 12582912.0f
#define LEAST_STEP 1e-37f
#define TILE 1024

/* -- one block: asked for, packed, and what is left ------------------------------------------------ */

/* Of whether numbers replace those that are there, or are added to them. */
#define PUT(place, number, add) ((place) = (add) ? (place) + (number) : (number))

/* values += residual; return the bits of the largest magnitude, where NaN is above infinity. */
INLINE uint32_t ask(float *restrict values, const float *restrict residual, int64_t count) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        float asked = values[i] + residual[i];
        int32_t size = (int32_t)(bits_of(asked) & 0x7fffffffu);
        values[i] = asked;
        largest = size > largest ? size : largest;
    }
    return (uint32_t)largest;
}

/* values *= factor; return the bits of the largest magnitude. */
INLINE uint32_t scale(float *restrict values, float factor, int64_t count) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        float scaled = values[i] * factor;
        int32_t size = (int32_t)(bits_of(scaled) & 0x7fffffffu);
        values[i] = scaled;
        largest = size > largest ? size : largest;
    }
    return (uint32_t)largest;
}

/* Return the bits of the largest magnitude, `largest` among them. */
INLINE int32_t largest_of(const float *values, int64_t count, int32_t largest) {
    for (int64_t i = 0; i < count; i++) {
        int32_t size = (int32_t)(bits_of(values[i]) & 0x7fffffffu);
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* `left` may be `values`. A block with NaN or infinity has the codes 0. */
INLINE void round_block(const float *values, float *left, int8_t *restrict codes, int64_t count, float step) {
    if (bits_of(step) >= INFINITY_BITS) {
        float sent = 0.0f * step;
        memset(codes, 0, (size_t)count);
        for (int64_t i = 0; i < count; i++) left[i] = values[i] - sent;
        return;
    }
    float inverse = step == 0.0f ? 0.0f : 1.0f / step;
    for (int64_t i = 0; i < count; i++) {
        float rounded = values[i] * inverse + ROUNDER;
        float sent = (rounded - ROUNDER) * step;
        codes[i] = (int8_t)(uint8_t)bits_of(rounded);
        left[i] = values[i] - sent;
    }
}

INLINE float step_of(uint32_t largest, float top) {
    float step = number_of(largest) / top;
    return step < LEAST_STEP ? 0.0f : step;
}

/* -- int8 ------------------------------------------------------------------------------------------ */

INLINE void pack_int8(float *values, uint32_t largest, uint8_t *packed, int64_t at, int64_t total, int64_t block) {
    float *scales = (float *)packed;
    int8_t *codes = (int8_t *)(packed + 4 * (total / block)) + at;
    float step = step_of(largest, 127.0f);
    scales[at / block] = step;
    round_block(values, values, codes, block, step);
}

INLINE void unpack_int8(const uint8_t *packed, float *restrict values, int64_t at, int64_t total, int64_t block,
                        int add) {
    float step = ((const float *)packed)[at / block];
    const int8_t *restrict codes = (const int8_t *)(packed + 4 * (total / block)) + at;
    for (int64_t i = 0; i < block; i++) PUT(values[i], (float)codes[i] * step, add);
}

/* -- int4: the first half of the piece in the low nibbles, the second half in the high ones ---------- */

INLINE void pack_int4(float *values, uint32_t largest, uint8_t *packed, int64_t at, int64_t total, int64_t block) {
    float *scales = (float *)packed;
    uint8_t *restrict nibbles = packed + 4 * (total / block);
    int64_t half = total / 2;
    float step = step_of(largest, 7.0f);
    int8_t codes[TILE];
    scales[at / block] = step;
    round_block(values, values, codes, block, step);
    int64_t low = at >= half ? 0 : (half - at < block ? half - at : block);
    for (int64_t i = 0; i < low; i++) nibbles[at + i] = (uint8_t)codes[i] & 15u;
    for (int64_t i = low; i < block; i++) nibbles[at + i - half] |= (uint8_t)((uint8_t)codes[i] << 4);
}

INLINE void unpack_int4(const uint8_t *packed, float *restrict values, int64_t at, int64_t total, int64_t block,
                        int add) {
    float step = ((const float *)packed)[at / block];
    const uint8_t *restrict nibbles = packed + 4 * (total / block);
    int64_t half = total / 2;
    int64_t low = at >= half ? 0 : (half - at < block ? half - at : block);
    for (int64_t i = 0; i < low; i++) {
        int32_t code = (int32_t)(nibbles[at + i] & 15u);
        PUT(values[i], (float)((code ^ 8) - 8) * step, add);
    }
    for (int64_t i = low; i < block; i++) {
        int32_t code = (int32_t)(nibbles[at + i - half] >> 4);
        PUT(values[i], (float)((code ^ 8) - 8) * step, add);
    }
}

/* -- bf16 ------------------------------------------------------------------------------------------ */

INLINE uint32_t to_bf16(float number) {
    uint32_t bits = bits_of(number);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > INFINITY_BITS ? 0x7fc0u : rounded;
}

INLINE void pack_bf16(float *values, uint32_t largest, uint8_t *packed, int64_t at, int64_t total, int64_t block) {
    (void)largest, (void)total;
    uint16_t *restrict numbers = (uint16_t *)packed + at;
    for (int64_t i = 0; i < block; i++) {
        uint32_t bits = to_bf16(values[i]);
        numbers[i] = (uint16_t)bits;
        values[i] = values[i] - number_of(bits << 16);
    }
}

INLINE void unpack_bf16(const uint8_t *packed, float *restrict values, int64_t at, int64_t total, int64_t block,
                        int add) {
    (void)total;
    const uint16_t *restrict numbers = (const uint16_t *)packed + at;
    for (int64_t i = 0; i < block; i++) PUT(values[i], number_of((uint32_t)numbers[i] << 16), add);
}

/* -- fp16, scaled by a power of two a block ---------------------------------------------------------- */

INLINE uint32_t to_fp16(float number) {
    uint32_t bits = bits_of(number), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    uint32_t normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    /* Subnormal below 2^-14: steps of 2^-24, rounded by an addition whose last place is that. */
    uint32_t subnormal = bits_of(number_of(size) + 0.5f) - 0x3f000000u;
    uint32_t found = size < (113u << 23) ? subnormal : normal;
    found = found > 0x7c00u ? 0x7c00u : found;
    return sign | (size > INFINITY_BITS ? 0x7e00u : (size >= 0x47800000u ? 0x7c00u : found));
}

INLINE float from_fp16(uint32_t half) {
    uint32_t size = half & 0x7fffu;
    uint32_t normal = (size << 13) + (112u << 23) + (size >= 0x7c00u ? 112u << 23 : 0u);
    uint32_t subnormal = bits_of((float)(int32_t)size * 0x1p-24f);
    return number_of(((half & 0x8000u) << 16) | (size < 0x400u ? subnormal : normal));
}

/* The power of two above `largest`, as frexp gives it, less 14. */
INLINE float power_step(uint32_t largest) {
    int32_t exponent = (int32_t)(largest >> 23);
    exponent = largest >= INFINITY_BITS || largest == 0 ? 0 : exponent - 126; /* subnormal ones are clamped */
    exponent -= 14;
    exponent = exponent < -120 ? -120 : (exponent > 120 ? 120 : exponent);
    return number_of((uint32_t)(exponent + 127) << 23);
}

INLINE void pack_fp16(float *values, uint32_t largest, uint8_t *packed, int64_t at, int64_t total, int64_t block) {
    float *scales = (float *)packed;
    uint16_t *restrict numbers = (uint16_t *)(packed + 4 * (total / block)) + at;
    float step = power_step(largest);
    float inverse = 1.0f / step; /* exact */
    scales[at / block] = step;
    for (int64_t i = 0; i < block; i++) {
        uint32_t half = to_fp16(values[i] * inverse);
        numbers[i] = (uint16_t)half;
        values[i] = values[i] - from_fp16(half) * step;
    }
}

INLINE void unpack_fp16(const uint8_t *packed, float *restrict values, int64_t at, int64_t total, int64_t block,
                        int add) {
    float step = ((const float *)packed)[at / block];
    const uint16_t *restrict numbers = (const uint16_t *)(packed + 4 * (total / block)) + at;
    for (int64_t i = 0; i < block; i++) PUT(values[i], from_fp16(numbers[i]) * step, add);
}

/* -- what is exported, for each format ---------------------------------------------------------------- */

/* encode: values += residual; packed = those; values = what was asked less what was sent.

   add_up: my piece: values += residual; their mean with the unpacked `pieces` (row `mine` is not read), in the
   order of rows, is packed; values = what was asked less my own contribution, as codecs/quantise.py defines it.

   land: values move to `residual`, and what `packed` stands for takes their place; return whether all is finite. */
#define FORMAT(NAME)                                                                                            \
    EXPORT void farandole_encode_##NAME(float *values, const float *residual, uint8_t *packed, int64_t total,   \
                                        int64_t block) {                                                        \
        for (int64_t at = 0; at < total; at += block) {                                                         \
            uint32_t largest = ask(values + at, residual + at, block);                                          \
            pack_##NAME(values + at, largest, packed, at, total, block);                                        \
        }                                                                                                       \
    }                                                                                                           \
    EXPORT void farandole_add_up_##NAME(float *values, const float *residual, const uint8_t *pieces,            \
                                        int64_t stride, int64_t mine, int64_t size, uint8_t *packed,            \
                                        int64_t total, int64_t block) {                                         \
        float sum[TILE];                                                                                        \
        float share = (float)(1.0 / (double)size), ranks = (float)size;                                         \
        for (int64_t at = 0; at < total; at += block) {                                                         \
            float *restrict asked = values + at;                                                                \
            const float *restrict left = residual + at;                                                         \
            for (int64_t i = 0; i < block; i++) sum[i] = asked[i] = asked[i] + left[i];                         \
            for (int64_t row = 0; row < size; row++)                                                            \
                if (row != mine) unpack_##NAME(pieces + row * stride, sum, at, total, block, 1);                \
            pack_##NAME(sum, scale(sum, share, block), packed, at, total, block);                               \
            for (int64_t i = 0; i < block; i++) asked[i] = asked[i] - (asked[i] - sum[i] * ranks);              \
        }                                                                                                       \
    }                                                                                                           \
    EXPORT int64_t farandole_land_##NAME(const uint8_t *packed, float *values, float *restrict residual,        \
                                         int64_t total, int64_t block) {                                        \
        int32_t largest = 0;                                                                                    \
        for (int64_t at = 0; at < total; at += block) {                                                         \
            memcpy(residual + at, values + at, (size_t)block * sizeof(float));                                  \
            unpack_##NAME(packed, values + at, at, total, block, 0);                                            \
            largest = largest_of(values + at, block, largest);                                                  \
        }                                                                                                       \
        return (uint32_t)largest < INFINITY_BITS;                                                               \
    }

FORMAT(int8)
FORMAT(int4)
FORMAT(bf16)
FORMAT(fp16)

/* -- sums in shared memory ---------------------------------------------------------------------------- */

INLINE void sum_tile(float *restrict sum, float *const *parts, int64_t rows, int64_t at, int64_t count) {
    const float *restrict first = parts[0] + at, *restrict second = parts[1] + at;
    for (int64_t i = 0; i < count; i++) sum[i] = first[i] + second[i];
    for (int64_t row = 2; row < rows; row++) {
        const float *restrict other = parts[row] + at;
        for (int64_t i = 0; i < count; i++) sum[i] += other[i];
    }
}

/* Add `rows` (at least 2) parts in their order; write the sum into the first `targets` of them. */
EXPORT void farandole_sum_rows(float *const *parts, int64_t rows, int64_t targets, int64_t total) {
    if (rows == 2 && targets == 2) {
        float *restrict first = parts[0], *restrict second = parts[1];
        for (int64_t i = 0; i < total; i++) {
            float sum = first[i] + second[i];
            first[i] = sum;
            second[i] = sum;
        }
        return;
    }
    for (int64_t at = 0; at < total; at += TILE) {
        float sum[TILE];
        int64_t count = total - at < TILE ? total - at : TILE;
        sum_tile(sum, parts, rows, at, count);
        for (int64_t row = 0; row < targets; row++)
            memcpy(parts[row] + at, sum, (size_t)count * sizeof(float));
    }
}
