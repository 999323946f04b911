/* The loops, compiled once per instruction set: native.c defines NAME and INSTRUCTIONS before each inclusion.
 *
 * The code uses the vector extensions of GCC and Clang. Each element has the same operations in the same order on all
 * machines, without contraction (-ffp-contract=off), so all instruction sets give bitwise identical results. */

#if INSTRUCTIONS > 0 && defined(__clang__)
#if INSTRUCTIONS == AVX512
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c"))), apply_to = function)
#else
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#endif
#elif INSTRUCTIONS > 0
#pragma GCC push_options
#if INSTRUCTIONS == AVX512
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=512")
#else
#pragma GCC target("avx2,f16c,fma")
#endif
#endif

#if INSTRUCTIONS == AVX512
#define WIDTH 8
#define floatsN floats8
#define intsN ints8
#define doublesN doubles8
#define wordsN longs8
#define COUNT ((longs8){0, 1, 2, 3, 4, 5, 6, 7})
#define PRODUCT(words, factor) ((longs8)_mm512_mul_epu32((__m512i)(words), _mm512_set1_epi64(factor)))
#define FLOAT16S_AT(at) ((floats8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at))))
#define DOUBLES_OF(floats) ((doubles8)_mm512_cvtps_pd((__m256)(floats)))
#else
#define WIDTH 4
#define floatsN floats4
#define intsN ints4
#define doublesN doubles4
#if INSTRUCTIONS == AVX2
#define wordsN longs4
#define COUNT ((longs4){0, 1, 2, 3})
#define PRODUCT(words, factor) ((longs4)_mm256_mul_epu32((__m256i)(words), _mm256_set1_epi64x(factor)))
#define FLOAT16S_AT(at) ((floats4)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)(at))))
/* GCC passes the half of a __builtin_convertvector through memory. */
#define DOUBLES_OF(floats) ((doubles4)_mm256_cvtps_pd((__m128)(floats)))
#else
#define wordsN uint64_t
#define PRODUCT(word, factor) (((word) & 0xffffffff) * (factor))
#define DOUBLES_OF(floats) __builtin_convertvector(floats, doubles4)
#define FLOAT16S_AT(at) floats_of_float16((const uint16_t *)(at))
#endif
#endif

#define INLINE static inline __attribute__((always_inline))

/* Half precision <-> float32, in blocks that fit in the L1 cache. ---------------------------------------------------- */

static void NAME(widen_bfloat16)(const uint16_t *restrict from, float *restrict to, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(&to[i], &bits, 4);
    }
}

/* Round to nearest, ties to even; NaN as in torch. */
static void NAME(round_bfloat16)(const float *restrict from, uint16_t *restrict to, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &from[i], 4);
        uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        to[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

/* Master weights from bfloat16 weights and 16-bit remainders: `meshstep.amp.master_weights` has the formulas. A remainder
 * that cannot belong to the weight (negative at a zero, positive at an infinity) is stale, and counts as 0. */
static void NAME(join)(const uint16_t *restrict weight, const int16_t *restrict rest, float *restrict to, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t whole = (uint32_t)weight[i] << 16, code = whole + (uint32_t)(int32_t)rest[i], size = code & 0x7fffffff;
        uint32_t bits = size >= 0x7f808000 ? code + 0x8000 : code;
        bits = size >= 0x7fff8000 || size - 0x7f800001 < 0x7fff ? whole : bits;
        memcpy(&to[i], &bits, 4);
    }
}

static void NAME(split)(const float *restrict from, uint16_t *restrict weight, int16_t *restrict rest, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &from[i], 4);
        uint32_t size = bits & 0x7fffffff, quiet = size < 0x7f810000 ? bits | 0x400000 : bits;
        uint32_t code = size > 0x7f800000 ? quiet - 0x8000 : bits;
        weight[i] = (uint16_t)((code + 0x8000) >> 16);
        rest[i] = (int16_t)code;
    }
}

static void NAME(widen_float16)(const uint16_t *restrict from, float *restrict to, int64_t n) {
    int64_t i = 0;
#if INSTRUCTIONS > 0
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < n; i++) to[i] = float_of_float16(from[i]);
}

static void NAME(round_float16)(const float *restrict from, uint16_t *restrict to, int64_t n) {
    int64_t i = 0;
#if INSTRUCTIONS > 0
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) to[i] = float16_of_float(from[i]);
}

static const float *NAME(widened)(int dtype, const void *base, int64_t at, int64_t n, float *buffer) {
    if (dtype == FLOAT32) return (const float *)base + at;
    if (dtype == BFLOAT16) NAME(widen_bfloat16)((const uint16_t *)base + at, buffer, n);
    else NAME(widen_float16)((const uint16_t *)base + at, buffer, n);
    return buffer;
}

static void NAME(written_half)(int dtype, const float *from, void *base, int64_t at, int64_t n) {
    if (dtype == BFLOAT16) NAME(round_bfloat16)(from, (uint16_t *)base + at, n);
    else NAME(round_float16)(from, (uint16_t *)base + at, n);
}

/* Powers: 64 sums in float64, added in a fixed order. ---------------------------------------------------------------- */

static double NAME(together)(const double *sums) {
    double pairs[LANES];
    memcpy(pairs, sums, sizeof pairs);
    for (int width = LANES / 2; width; width /= 2)
        for (int j = 0; j < width; j++) pairs[j] += pairs[j + width];
    return pairs[0];
}

/* The square of a float32 is exact in float64, so a fused multiply-add rounds like a multiplication and an addition. */
INLINE doublesN NAME(added)(doublesN sum, floatsN floats, const int squares) {
    if (!squares) floats = (floatsN)((intsN)floats & 0x7fffffff);
    doublesN values = DOUBLES_OF(floats);
#if INSTRUCTIONS == AVX512
    if (squares) return (doublesN)_mm512_fmadd_pd((__m512d)values, (__m512d)values, (__m512d)sum);
#elif INSTRUCTIONS == AVX2
    if (squares) return (doublesN)_mm256_fmadd_pd((__m256d)values, (__m256d)values, (__m256d)sum);
#endif
    return sum + (squares ? values * values : values);
}

/* Add the next EACH elements of a stream to its sums. bfloat16 elements are read in pairs, which needs two operations per
 * pair: even elements are added to the first half of the sums, odd elements to the second half. */
INLINE void NAME(add)(doublesN *sums, const int dtype, const char *at, const int squares) {
    enum { HALF = EACH / 2 / WIDTH };
#pragma GCC unroll 2
    for (int k = 0; k < HALF; k++) {
        floatsN first, second;
        if (dtype == FLOAT32) {
            memcpy(&first, at + 4 * WIDTH * k, sizeof first);
            memcpy(&second, at + 4 * WIDTH * (HALF + k), sizeof second);
        } else if (dtype == BFLOAT16) {
            intsN pairs;
            memcpy(&pairs, at + 4 * WIDTH * k, sizeof pairs);
            first = (floatsN)(pairs << 16);
            second = (floatsN)(pairs & (int32_t)0xffff0000);
        } else {
            first = FLOAT16S_AT(at + 2 * WIDTH * k);
            second = FLOAT16S_AT(at + 2 * WIDTH * (HALF + k));
        }
        sums[k] = NAME(added)(sums[k], first, squares);
        sums[HALF + k] = NAME(added)(sums[HALF + k], second, squares);
    }
}

/* Sum |x|, or x^2 if `squares`. Each of STREAMS equal parts of the elements has sums of its own, so the result is the same if the
 * parts are read in turn or at once. The elements that remain are added to the first sums. */
INLINE double NAME(sum)(const int dtype, const void *base, int64_t n, const int squares) {
    enum { VECTORS = EACH / WIDTH };
    const int size = dtype == FLOAT32 ? 4 : 2;
    const int64_t part = n / LANES * EACH;
    doublesN sums[STREAMS * VECTORS] = {{0}};
    if (loops->in_turn) {
        for (int stream = 0; stream < STREAMS; stream++) {
            const char *at = (const char *)base + stream * part * size;
            doublesN own[VECTORS] = {{0}};
            for (int64_t i = 0; i < part; i += EACH, at += EACH * size) {
                __builtin_prefetch(at + NEAR, 0, 2); /* to the L2 cache */
                NAME(add)(own, dtype, at, squares);
            }
            memcpy(sums + stream * VECTORS, own, sizeof own);
        }
    } else {
        for (int64_t i = 0; i < part; i += EACH)
#pragma GCC unroll 4
            for (int stream = 0; stream < STREAMS; stream++) {
                const char *at = (const char *)base + (stream * part + i) * size;
                __builtin_prefetch(at + FAR);
                NAME(add)(sums + stream * VECTORS, dtype, at, squares);
            }
    }
    double lanes[LANES];
    memcpy(lanes, sums, sizeof lanes);
    float rest[LANES];
    const int64_t done = part * STREAMS;
    const float *last = NAME(widened)(dtype, base, done, n - done, rest);
    for (int lane = 0; lane < n - done; lane++) {
        double value = last[lane];
        lanes[lane] += squares ? value * value : fabs(value);
    }
    return NAME(together)(lanes);
}

INLINE double NAME(sum_of_doubles)(const double *x, int64_t n, const int squares) {
    double sums[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) sums[j] += squares ? x[i + j] * x[i + j] : fabs(x[i + j]);
    for (int lane = 0; i < n; i++, lane++) sums[lane] += squares ? x[i] * x[i] : fabs(x[i]);
    return NAME(together)(sums);
}

/* The largest absolute value, compared by bits: without the sign, bits are ordered like values, with NaN as the largest. */
#define LARGEST(kind, bits, mask)                                       \
    static bits NAME(largest_##kind)(const bits *restrict x, int64_t n) { \
        bits found = 0;                                                 \
        for (int64_t i = 0; i < n; i++) {                               \
            bits value = x[i] & mask;                                   \
            found = value > found ? value : found;                      \
        }                                                               \
        return found;                                                   \
    }
LARGEST(16, uint16_t, 0x7fff)
LARGEST(32, uint32_t, 0x7fffffff)
LARGEST(64, uint64_t, 0x7fffffffffffffff)
#undef LARGEST

static double NAME(largest)(int dtype, const void *x, int64_t n) {
    if (dtype == FLOAT64) {
        uint64_t bits = NAME(largest_64)(x, n);
        double value;
        memcpy(&value, &bits, 8);
        return value;
    }
    if (dtype == FLOAT32) {
        uint32_t bits = NAME(largest_32)(x, n);
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
    uint16_t bits = NAME(largest_16)(x, n);
    float value;
    if (dtype == BFLOAT16) NAME(widen_bfloat16)(&bits, &value, 1);
    else value = float_of_float16(bits);
    return value;
}

/* out[i]: the mean of |x|, or of x^2 if `squares`, of the i-th EIGHT elements. Missing elements at the end count as zeros. The
 * order of the additions is fixed: ((0+4)+(2+6)) + ((1+5)+(3+7)). */
INLINE void NAME(means_of_eight)(const int dtype, const void *base, int64_t n, double *out, const int squares) {
    float buffer[BLOCK];
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        int64_t count = n - begin < BLOCK ? n - begin : BLOCK;
        const float *x = NAME(widened)(dtype, base, begin, count, buffer);
        if (count % EIGHT) {
            if (x != buffer) memcpy(buffer, x, (size_t)count * sizeof *x);
            x = buffer;
            while (count % EIGHT) buffer[count++] = 0;
        }
        for (int64_t i = 0; i < count; i += EIGHT) {
            double lanes[WIDTH];
            doublesN sums = {0};
            for (int j = 0; j < EIGHT; j += WIDTH) {
                floatsN floats;
                memcpy(&floats, x + i + j, sizeof floats);
                sums = NAME(added)(sums, floats, squares);
            }
            memcpy(lanes, &sums, sizeof lanes);
#if WIDTH == EIGHT
            for (int j = 0; j < 4; j++) lanes[j] += lanes[j + 4];
#endif
            *out++ = 0.125 * ((lanes[0] + lanes[2]) + (lanes[1] + lanes[3]));
        }
    }
}

static void NAME(means)(int dtype, int squares, const void *base, int64_t start, int64_t n, double *out) {
    const char *x = (const char *)base + start * size_of(dtype);
    if (squares) NAME(means_of_eight)(dtype, x, n, out, 1);
    else NAME(means_of_eight)(dtype, x, n, out, 0);
}

/* The power of one chunk. */
static double NAME(power)(int dtype, int norm_type, const void *base, int64_t start, int64_t n) {
    const char *x = (const char *)base + start * size_of(dtype);
    if (norm_type == LARGEST_ONE) return NAME(largest)(dtype, x, n);
    if (dtype == FLOAT64)
        return norm_type == 2 ? NAME(sum_of_doubles)((const double *)x, n, 1) : NAME(sum_of_doubles)((const double *)x, n, 0);
    if (dtype == FLOAT32) return norm_type == 2 ? NAME(sum)(FLOAT32, x, n, 1) : NAME(sum)(FLOAT32, x, n, 0);
    if (dtype == BFLOAT16) return norm_type == 2 ? NAME(sum)(BFLOAT16, x, n, 1) : NAME(sum)(BFLOAT16, x, n, 0);
    return norm_type == 2 ? NAME(sum)(FLOAT16, x, n, 1) : NAME(sum)(FLOAT16, x, n, 0);
}

/* Updates of one block; `factor` is negative to maximize. ------------------------------------------------------------ */

/* Kingma, Ba 2015 (arXiv:1412.6980), Loshchilov, Hutter 2019 (arXiv:1711.05101), Reddi et al. 2018 (amsgrad). */
INLINE void NAME(adam)(float *restrict p, const float *restrict grad, float *restrict m, float *restrict v,
                       float *restrict most, int64_t n, const struct adam *set, float step_size, float root,
                       const int decoupled, const int amsgrad) {
    const float factor = set->factor, beta1 = set->beta1, beta2 = set->beta2, rest1 = set->rest1, rest2 = set->rest2, eps = set->eps;
    const float decay = set->decay;
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * factor, w = p[i];
        if (decoupled) w = w * decay;
        else g = g + decay * w;
        float mean = m[i] * beta1 + rest1 * g;
        float square = v[i] * beta2 + rest2 * g * g;
        m[i] = mean;
        v[i] = square;
        if (amsgrad) {
            square = most[i] > square ? most[i] : square;
            most[i] = square;
        }
        p[i] = w - step_size * mean / (sqrtf(square) / root + eps);
    }
}

/* torch's SGD; Sutskever et al. 2013 for Nesterov's. */
INLINE void NAME(sgd)(float *restrict p, const float *restrict grad, float *restrict momentum, int64_t n,
                      const struct sgd *set, const int has_momentum, const int nesterov) {
    const float factor = set->factor, decay = set->decay, rate = set->rate, keep = set->momentum, rest = set->rest;
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * factor + decay * p[i];
        if (has_momentum) {
            float kept = momentum[i] * keep + g * rest;
            momentum[i] = kept;
            g = nesterov ? g + kept * keep : kept;
        }
        p[i] = p[i] - rate * g;
    }
}

/* Duchi et al. 2011. */
INLINE void NAME(adagrad)(float *restrict p, const float *restrict grad, float *restrict sum, int64_t n,
                          const struct adagrad *set, float rate) {
    const float factor = set->factor, decay = set->decay, eps = set->eps;
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * factor + decay * p[i];
        float square = sum[i] + g * g;
        sum[i] = square;
        p[i] = p[i] - rate * g / (sqrtf(square) + eps);
    }
}

/* Chen et al. 2023; the operations of meshstep.optim.lion in their order, so the results are bitwise identical. A gradient is
 * divided by 1 / factor, as there. The sign of NaN is 0, as in torch. */
INLINE void NAME(lion)(float *restrict p, const float *restrict grad, float *restrict momentum, int64_t n,
                       const struct lion *set) {
    const float scale = set->scale, beta1 = set->beta1, beta2 = set->beta2, rest1 = set->rest1, rest2 = set->rest2;
    const float rate = set->rate, decay = set->decay;
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] / scale, mean = momentum[i], mixed = mean * beta1 + g * rest1;
        p[i] = p[i] * decay + (float)((mixed > 0) - (mixed < 0)) * rate;
        momentum[i] = mean * beta2 + g * rest2;
    }
}

#if INSTRUCTIONS > 0
/* Convert a strip of elements of `dtype`, a constant. GCC makes scalar code of the loops over blocks if their length is known. */
INLINE void NAME(widen_strip)(const int dtype, const uint16_t *from, float *to) {
#if INSTRUCTIONS == AVX512
    __m256i halves = _mm256_loadu_si256((const __m256i *)from);
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16); /* of bfloat16 */
    _mm512_storeu_ps(to, dtype == FLOAT16 ? _mm512_cvtph_ps(halves) : _mm512_castsi512_ps(bits));
#else
    for (int k = 0; k < STRIP; k += 8) {
        __m128i halves = _mm_loadu_si128((const __m128i *)(from + k));
        __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
        _mm256_storeu_ps(to + k, dtype == FLOAT16 ? _mm256_cvtph_ps(halves) : _mm256_castsi256_ps(bits));
    }
#endif
}

INLINE __m256i NAME(rounded_strip)(const int dtype, const float *from) {
#if INSTRUCTIONS == AVX512
    if (dtype == FLOAT16) return _mm512_cvtps_ph(_mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
    words16 bits;
    memcpy(&bits, from, sizeof bits);
    words16 nans = (words16)((bits & 0x7fffffff) > 0x7f800000), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (__m256i)__builtin_convertvector((rounded & ~nans) | (nans & 0x7fc0), halves16);
#else
    __m256 values[2] = {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
    if (dtype == FLOAT16)
        return _mm256_set_m128i(_mm256_cvtps_ph(values[1], _MM_FROUND_TO_NEAREST_INT),
                                _mm256_cvtps_ph(values[0], _MM_FROUND_TO_NEAREST_INT));
    if (_mm256_movemask_ps(_mm256_cmp_ps(values[0], values[1], _CMP_UNORD_Q))) { /* a NaN */
        uint16_t halves[STRIP];
        NAME(round_bfloat16)(from, halves, STRIP);
        return _mm256_loadu_si256((const __m256i *)halves);
    }
    __m256i rounded[2];
    for (int k = 0; k < 2; k++) {
        __m256i bits = _mm256_castps_si256(values[k]), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        rounded[k] = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    }
    /* The pack interleaves the 64-bit quarters of both vectors. */
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded[0], rounded[1]), 0xd8);
#endif
}

/* Round the floats of two strips to halves, which fill one cache line. past_caches: write the line to memory directly, which
 * saves reading it first; `to` must be the address of a line. */
INLINE void NAME(round_line)(const int dtype, const float *from, uint16_t *to, int past_caches) {
    __m256i halves[2] = {NAME(rounded_strip)(dtype, from), NAME(rounded_strip)(dtype, from + STRIP)};
    for (int k = 0; k < 2; k++) {
        __m256i *at = (__m256i *)(to + k * STRIP);
        if (past_caches) _mm256_stream_si256(at, halves[k]);
        else _mm256_storeu_si256(at, halves[k]);
    }
}
#endif

/* Adam in strips of one cache line, with prefetches between strips, because a vectorised loop cannot contain prefetches.
 * Gradients of another dtype than float32 are widened while they are in registers, and parameters are rounded to `copy` after
 * every second strip.
 * copy_dtype: FLOAT32 if no copies are written. Then `copy` is only prefetched; it can be NULL.
 * past_caches: write copies to memory directly. Copies that do not begin at a cache line are written as usual. */
INLINE void NAME(adam_strips)(float *restrict p, const char *restrict grad, float *restrict m, float *restrict v,
                              float *restrict most, uint16_t *restrict copy, int64_t n, const struct adam set, float step_size,
                              float root, const int grad_dtype, const int copy_dtype, int past_caches, const int decoupled,
                              const int amsgrad) {
    const int size = grad_dtype == FLOAT32 ? 4 : 2;
    const int64_t ahead = loops->in_turn ? NEAR : FAR;
    float wide[LINE];
    int64_t i = 0;
    past_caches = past_caches && (uintptr_t)copy % (LINE * sizeof *copy) == 0;
    for (; i + LINE <= n; i += LINE) {
        for (int64_t k = i; k < i + LINE; k += STRIP) {
            const char *raw = grad + k * size;
            const float *g = grad_dtype == FLOAT32 ? (const float *)raw : wide;
            __builtin_prefetch((const char *)(p + k) + ahead, 1);
            __builtin_prefetch(raw + ahead);
            __builtin_prefetch((const char *)(m + k) + ahead, 1);
            __builtin_prefetch((const char *)(v + k) + ahead, 1);
#if INSTRUCTIONS > 0
            if (grad_dtype != FLOAT32) NAME(widen_strip)(grad_dtype, (const uint16_t *)raw, wide);
#endif
            NAME(adam)(p + k, g, m + k, v + k, amsgrad ? most + k : NULL, STRIP, &set, step_size, root, decoupled, amsgrad);
        }
        if (copy && !past_caches) __builtin_prefetch((const char *)(copy + i) + ahead, 1);
#if INSTRUCTIONS > 0
        if (copy_dtype != FLOAT32) NAME(round_line)(copy_dtype, p + i, copy + i, past_caches);
#endif
    }
    const float *g = NAME(widened)(grad_dtype, grad, i, n - i, wide);
    NAME(adam)(p + i, g, m + i, v + i, amsgrad ? most + i : NULL, n - i, &set, step_size, root, decoupled, amsgrad);
    if (copy_dtype != FLOAT32) NAME(written_half)(copy_dtype, p + i, copy + i, 0, n - i);
}

/* Adam of one block that converts gradients and copies in registers, for the usual pairs of their dtypes. Returns 0, and changes
 * nothing, for other dtypes, for amsgrad, and without vector instructions. */
static int NAME(adam_converting)(const struct update *update, float *p, const char *grad, float *m, float *v, uint16_t *copy,
                                 int64_t n, float step, float root) {
#if INSTRUCTIONS > 0
    const struct adam *set = &update->adam;
    const int grad_dtype = update->grad_dtype, copy_dtype = copy ? update->half_dtype : FLOAT32;
#define STRIPS(OF_GRAD, OF_COPY, DECOUPLED)                                                                             \
    NAME(adam_strips)(p, grad, m, v, NULL, copy, n, *set, step, root, OF_GRAD, OF_COPY, update->past_caches, DECOUPLED, 0)
#define IF_DTYPES(OF_GRAD, OF_COPY)                                                                                     \
    if (grad_dtype == OF_GRAD && copy_dtype == OF_COPY) {                                                               \
        if (set->decoupled) STRIPS(OF_GRAD, OF_COPY, 1);                                                                \
        else STRIPS(OF_GRAD, OF_COPY, 0);                                                                               \
        return 1;                                                                                                       \
    }
    if (set->amsgrad) return 0;
    IF_DTYPES(FLOAT32, BFLOAT16)
    IF_DTYPES(FLOAT32, FLOAT16)
    IF_DTYPES(BFLOAT16, BFLOAT16)
    IF_DTYPES(FLOAT16, FLOAT16)
#undef IF_DTYPES
#undef STRIPS
#endif
    return 0;
}

static void NAME(update)(const struct update *update, const struct tensor *tensor, int64_t start, int64_t length) {
    const float step = tensor->by_step[0], root = tensor->by_step[1];
    float buffer[BLOCK], joined[BLOCK];
    for (int64_t at = start; at < start + length; at += BLOCK) {
        int64_t n = start + length - at < BLOCK ? start + length - at : BLOCK;
        float *p = tensor->rest ? joined : tensor->param + at;
        uint16_t *half = tensor->half ? (uint16_t *)tensor->half + at : NULL;
        float *first = tensor->first ? tensor->first + at : NULL, *second = tensor->second ? tensor->second + at : NULL;
        if (update->kind == ADAM && !tensor->rest) {
            const char *raw = (const char *)tensor->grad + at * size_of(update->grad_dtype);
            if (NAME(adam_converting)(update, p, raw, first, second, half, n, step, root)) continue;
        }
        if (tensor->rest) NAME(join)(half, tensor->rest + at, joined, n);
        const float *g = NAME(widened)(update->grad_dtype, tensor->grad, at, n, buffer);
        if (update->kind == ADAM) {
            const struct adam *set = &update->adam;
            float *most = set->amsgrad ? tensor->third + at : NULL;
#define STRIPS(DECOUPLED, AMSGRAD)                                                                                       \
    NAME(adam_strips)(p, (const char *)g, first, second, most, half, n, *set, step, root, FLOAT32, FLOAT32, 0, DECOUPLED, AMSGRAD)
            if (set->decoupled && !set->amsgrad) STRIPS(1, 0);
            else if (set->decoupled) STRIPS(1, 1);
            else if (!set->amsgrad) STRIPS(0, 0);
            else STRIPS(0, 1);
#undef STRIPS
        } else if (update->kind == SGD) {
            const struct sgd *set = &update->sgd;
            if (!first) NAME(sgd)(p, g, first, n, set, 0, 0);
            else if (set->nesterov) NAME(sgd)(p, g, first, n, set, 1, 1);
            else NAME(sgd)(p, g, first, n, set, 1, 0);
        } else if (update->kind == LION) {
            NAME(lion)(p, g, first, n, &update->lion);
        } else {
            NAME(adagrad)(p, g, first, n, &update->adagrad, step);
        }
        if (tensor->rest) NAME(split)(joined, half, tensor->rest + at, n);
        else if (half) NAME(written_half)(update->half_dtype, p, half, 0, n);
    }
#if INSTRUCTIONS > 0
    if (update->past_caches) _mm_sfence(); /* other threads may read the copies after this function */
#endif
}

/* Stochastic rounding. ----------------------------------------------------------------------------------------------- */

/* Philox 4x32 with 10 rounds (Salmon et al. 2011), of one counter per lane. A word is the lower half of a 64-bit lane, and so is
 * each half of the key; the upper halves are arbitrary. */
INLINE void NAME(philox)(wordsN words[4], uint64_t key) {
    uint64_t low = key, high = key >> 32;
    wordsN c0 = words[0], c1 = words[1], c2 = words[2], c3 = words[3];
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        wordsN a = PRODUCT(c0, 0xd2511f53), b = PRODUCT(c2, 0xcd9e8d57);
        c0 = b >> 32 ^ c1 ^ low, c1 = b;
        c2 = a >> 32 ^ c3 ^ high, c3 = a;
        low += 0x9e3779b9, high += 0xbb67ae85;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

/* Write the four words of Philox for the counter (first + i, number, step) to words[0..3][i], for at least `n` counters. With
 * vector instructions, also prefetch the elements that get this noise. */
static void NAME(draw)(uint32_t words[restrict 4][ROW], int64_t first, const struct rounding *of, int n) {
#if INSTRUCTIONS > 0
    const wordsN zeros = {0};
    for (int i = 0; i < n; i += 2 * WIDTH) {
        for (int k = 0; k < 2 * WIDTH; k += 2) __builtin_prefetch(of->source + ROWS * (first + i + k));
        for (int k = 0; k < 2 * WIDTH; k += 4) __builtin_prefetch(of->target + ROWS * (first + i + k), 1);
        wordsN even[4] = {2 * COUNT + (uint64_t)(first + i), zeros + of->number, zeros + of->step, zeros + (of->step >> 32)};
        wordsN odd[4] = {even[0] + 1, even[1], even[2], even[3]};
        NAME(philox)(even, of->key);
        NAME(philox)(odd, of->key);
        for (int k = 0; k < 4; k++) {
            wordsN both = (even[k] & 0xffffffff) | odd[k] << 32;
            memcpy(&words[k][i], &both, sizeof both);
        }
    }
#else
    for (int i = 0; i < n; i++) {
        wordsN one[4] = {(uint64_t)(first + i), of->number, of->step, of->step >> 32};
        NAME(philox)(one, of->key);
        for (int k = 0; k < 4; k++) words[k][i] = (uint32_t)one[k];
    }
#endif
}

/* A NaN gets no noise, because a carry would overflow its bits. shift: 0 or 16, for the lower or upper half of the words. */
static void NAME(round_row)(const uint32_t *restrict from, uint16_t *restrict to, const uint32_t *restrict words, int shift,
                            int n) {
    for (int i = 0; i < n; i++) {
        uint32_t noise = words[i] >> shift & 0xffff;
        to[i] = (uint16_t)((from[i] + ((from[i] & 0x7fffffff) > 0x7f800000 ? 0 : noise)) >> 16);
    }
}

/* `start` must be a multiple of ROWS * ROW. */
static void NAME(round)(const struct rounding *of, int64_t start, int64_t length) {
    uint32_t words[4][ROW];
    const int64_t end = start + length;
    for (int64_t block = start; block < end; block += ROWS * ROW) {
        NAME(draw)(words, block / ROWS, of, (int)(end - block < ROW ? end - block : ROW));
        for (int row = 0; row < ROWS && block + row * ROW < end; row++) {
            int64_t at = block + row * ROW, n = end - at < ROW ? end - at : ROW;
            NAME(round_row)(of->source + at, of->target + at, words[row / 2], row % 2 * 16, (int)n);
        }
    }
}
#undef INLINE
#undef WIDTH
#undef floatsN
#undef intsN
#undef doublesN
#undef wordsN
#undef COUNT
#undef PRODUCT
#undef FLOAT16S_AT
#undef DOUBLES_OF

#if INSTRUCTIONS > 0 && defined(__clang__)
#pragma clang attribute pop
#elif INSTRUCTIONS > 0
#pragma GCC pop_options
#endif
#undef NAME
#undef INSTRUCTIONS
