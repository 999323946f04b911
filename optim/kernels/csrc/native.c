/* Powers of gradients, updates of optimizers, and stochastic rounding in one pass over memory: plain C, without Python's or
 * torch's headers.
 *
 * native.py calls the functions through ctypes, with the addresses of tensors. meshstep_take selects a variant of the loops.
 * Results are bitwise identical for all variants (see loops.h). They are also bitwise identical for all numbers of
 * threads, because the results of chunks are added in a fixed order. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))

enum { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2, FLOAT16 = 3 };
enum { LARGEST_ONE = 0 }; /* the norm type of p = inf */
enum { ADAM = 0, SGD = 1, ADAGRAD = 2, LION = 3 };
enum { STREAMS = 4, EACH = 16, LANES = STREAMS * EACH, STRIP = 16, LINE = 32, BLOCK = 1024, CHUNK = 16384 };
enum { ENOUGH = 1 << 18 }; /* minimum number of elements per thread */
enum { MANY = 1 << 23 };   /* elements of an update whose copies are no longer in a cache when it ends */
enum { ROW = 512, ROWS = 8 }; /* stochastic rounding: one counter serves the elements of a column of ROWS rows */
#define EIGHT 8            /* elements of a mean; a macro, because loops.h compares it in #if */

typedef float floats4 __attribute__((vector_size(16)));
typedef float floats8 __attribute__((vector_size(32)));
typedef int32_t ints4 __attribute__((vector_size(16)));
typedef int32_t ints8 __attribute__((vector_size(32)));
typedef double doubles4 __attribute__((vector_size(32)));
typedef double doubles8 __attribute__((vector_size(64)));
typedef uint64_t longs4 __attribute__((vector_size(32)));
typedef uint64_t longs8 __attribute__((vector_size(64)));
typedef uint32_t words16 __attribute__((vector_size(64)));
typedef uint16_t halves16 __attribute__((vector_size(32)));

/* Hyper-parameters, rounded to float32 as in torch's kernels. */
struct adam { float factor, beta1, beta2, rest1, rest2, eps, decay; int decoupled, amsgrad; };
struct sgd { float factor, decay, rate, momentum, rest; int nesterov; };
struct adagrad { float factor, decay, eps; };
struct lion { float scale, beta1, beta2, rest1, rest2, rate, decay; }; /* scale: 1 / factor; rate: -lr */

struct update {
    int kind, grad_dtype, half_dtype;
    int past_caches; /* write half-precision copies to memory directly */
    union { struct adam adam; struct sgd sgd; struct adagrad adagrad; struct lion lion; };
};

struct tensor {
    float *param;
    const void *grad;
    float *first, *second, *third; /* the optimizer's states */
    void *half;                    /* the half-precision copy of param, or NULL */
    int16_t *rest;                 /* remainder of a split master weight, whose upper half is `half`; or NULL */
    float by_step[2];              /* factors that depend on the step count: learning rate, and Adam's divisor of sqrt(v) */
    int64_t numel;
};

struct rounding { /* stochastic rounding of one tensor */
    const uint32_t *source; /* float32 */
    uint16_t *target;       /* bfloat16 */
    uint64_t key, number, step;
};

static inline int64_t size_of(int dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

/* float16 conversions by bits, for machines without instructions for them. */
static inline float float_of_float16(uint16_t half) {
    uint32_t exponent = half & 0x7c00, bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    if (exponent == 0x7c00) bits |= 0x7f800000; /* inf, NaN */
    else if (exponent) bits += 112u << 23;
    else bits += 113u << 23; /* subnormal: 2^-14 (1 + x) - 2^-14 */
    memcpy(&value, &bits, 4);
    if (!exponent) value -= 0x1p-14f;
    memcpy(&bits, &value, 4);
    bits |= (uint32_t)(half & 0x8000) << 16;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t float16_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00 | (uint16_t)((bits >> 13) & 0x3ff);
    if (bits >= 0x477ff000) return sign | 0x7c00; /* rounds to infinity */
    if (bits < 0x38800000) {                      /* subnormal: adding 0.5 rounds to a multiple of 2^-24 */
        float shifted;
        memcpy(&shifted, &bits, 4);
        shifted += 0.5f;
        memcpy(&bits, &shifted, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    bits += 0xfff + ((bits >> 13) & 1) - (112u << 23);
    return sign | (uint16_t)(bits >> 13);
}

static inline floats4 floats_of_float16(const uint16_t *x) {
    return (floats4){float_of_float16(x[0]), float_of_float16(x[1]), float_of_float16(x[2]), float_of_float16(x[3])};
}

/* A variant of the loops: an instruction set and a way to read memory. The results of all variants are equal. Which one is
 * fastest depends on the processor. */
struct loops {
    const char *name;
    int instructions;
    int in_turn; /* 0: read several parts of a tensor at once, and prefetch FAR bytes ahead. 1: one part at a time, NEAR bytes */
    double (*power)(int, int, const void *, int64_t, int64_t);
    void (*means)(int, int, const void *, int64_t, int64_t, double *);
    void (*update)(const struct update *, const struct tensor *, int64_t, int64_t);
    void (*round)(const struct rounding *, int64_t, int64_t);
};

static const struct loops *loops; /* the variant in use */
enum { NEAR = 512, FAR = 1024 };  /* prefetch distances in bytes */

#define AVX2 1
#define AVX512 2

#define INSTRUCTIONS 0
#define NAME(name) name##_plain
#include "loops.h"

#if defined(__x86_64__)
#define INSTRUCTIONS AVX2
#define NAME(name) name##_avx2
#include "loops.h"

#define INSTRUCTIONS AVX512
#define NAME(name) name##_avx512
#include "loops.h"
#endif

/* Variants. ----------------------------------------------------------------------------------------------------------- */

static const struct loops all_loops[] = {
#if defined(__x86_64__)
    {"avx512", AVX512, 0, power_avx512, means_avx512, update_avx512, round_avx512},
    {"avx512 in turn", AVX512, 1, power_avx512, means_avx512, update_avx512, round_avx512},
    {"avx2", AVX2, 0, power_avx2, means_avx2, update_avx2, round_avx2},
    {"avx2 in turn", AVX2, 1, power_avx2, means_avx2, update_avx2, round_avx2},
#endif
    {"plain", 0, 0, power_plain, means_plain, update_plain, round_plain},
    {"plain in turn", 0, 1, power_plain, means_plain, update_plain, round_plain},
};
enum { VARIANTS = sizeof all_loops / sizeof *all_loops };

static int runs_here(int instructions) {
#if defined(__x86_64__)
    unsigned a, b, c = 0, d;
    if (instructions == AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    if (instructions == AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && runs_here(AVX2);
#endif
    return instructions == 0;
}

static const struct loops *loops = &all_loops[VARIANTS - 2]; /* plain */

/* Select the variant of this name, or the one with the widest instructions (NULL). Returns its name, or NULL if this machine
 * does not support it. */
EXPORT const char *meshstep_take(const char *name) {
    for (int index = 0; index < VARIANTS; index++) {
        const struct loops *found = &all_loops[index];
        if (runs_here(found->instructions) && (!name || !strcmp(name, found->name))) {
            loops = found;
            return loops->name;
        }
    }
    return NULL;
}

/* Remove this memory from all caches; on other processors than x86-64, do nothing. */
EXPORT void meshstep_evict(const void *base, int64_t bytes) {
#if defined(__x86_64__)
    for (int64_t at = 0; at < bytes; at += 64) _mm_clflush((const char *)base + at);
    _mm_mfence();
#else
    (void)base, (void)bytes;
#endif
}

/* Threads: those of torch's OpenMP runtime if it can be called. Its threads spin for some milliseconds while they wait for
 * work, so further threads would compete with them for cores. Otherwise threads are created per call. ----------------- */

struct shared {
    void (*work)(void *, int64_t, int64_t);
    void *context;
    int64_t count, part, next;
};

/* Each thread takes the next part when it has finished one, so a thread on a busy core takes fewer parts. */
static void take_parts(void *given) {
    struct shared *shared = given;
    for (int64_t begin; (begin = __atomic_fetch_add(&shared->next, shared->part, __ATOMIC_RELAXED)) < shared->count;) {
        int64_t end = begin + shared->part;
        shared->work(shared->context, begin, end < shared->count ? end : shared->count);
    }
}

static void *run_thread(void *given) {
    take_parts(given);
    return NULL;
}

typedef void parallel(void (*)(void *), void *, unsigned threads, unsigned flags);

static parallel *borrowed = NULL;

static void give_back(void) { borrowed = NULL; }

/* Use the threads of the OpenMP runtime with this GOMP_parallel; NULL: create threads per call. A forked process has no
 * threads of the runtime, so it creates threads per call. */
EXPORT void meshstep_borrow(parallel *of_runtime) {
    static int told = 0;
    if (!told) told = !pthread_atfork(NULL, NULL, give_back);
    borrowed = told ? of_runtime : NULL;
}

/* Call work(context, begin, end) for parts that cover [0, count). */
static void in_parallel(void (*work)(void *, int64_t, int64_t), void *context, int64_t count, int64_t elements, int threads) {
    enum { MOST = 256, PARTS = 32 };
    int64_t most = elements / ENOUGH;
    if (most < threads) threads = (int)most;
    if (threads > MOST) threads = MOST;
    if (threads < 2) {
        work(context, 0, count);
        return;
    }
    struct shared shared = {work, context, count, (count + threads * PARTS - 1) / (threads * PARTS), 0};
    if (borrowed) {
        borrowed(take_parts, &shared, (unsigned)threads, 0);
        return;
    }
    pthread_t ids[MOST];
    int started = 0;
    while (started < threads - 1 && !pthread_create(&ids[started], NULL, run_thread, &shared)) started++;
    take_parts(&shared);
    while (started > 0) pthread_join(ids[--started], NULL);
}

/* Powers. ------------------------------------------------------------------------------------------------------------ */

struct powers {
    const uint64_t *addresses;
    const int64_t *numels, *first_chunk;
    int64_t tensors;
    int dtype, norm_type;
    double *partial;
};

/* The first chunk of each tensor, followed by the number of chunks; NULL if out of memory. */
static int64_t *first_chunks(int64_t tensors, const int64_t *numels, int64_t *elements) {
    int64_t *first = malloc((size_t)(tensors + 1) * sizeof *first), chunks = 0;
    if (!first) return NULL;
    *elements = 0;
    for (int64_t i = 0; i < tensors; i++) {
        first[i] = chunks;
        chunks += (numels[i] + CHUNK - 1) / CHUNK;
        *elements += numels[i];
    }
    first[tensors] = chunks;
    return first;
}

/* The tensor of a chunk: the last tensor whose first chunk is not after it. */
static int64_t tensor_at(const int64_t *first_chunk, int64_t tensors, int64_t chunk) {
    int64_t low = 0, high = tensors;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (first_chunk[middle] <= chunk) low = middle;
        else high = middle;
    }
    return low;
}

static void powers_of_chunks(void *given, int64_t begin, int64_t end) {
    struct powers *p = given;
    int64_t tensor = tensor_at(p->first_chunk, p->tensors, begin);
    for (int64_t chunk = begin; chunk < end; chunk++) {
        while (chunk >= p->first_chunk[tensor + 1]) tensor++;
        int64_t start = (chunk - p->first_chunk[tensor]) * CHUNK, rest = p->numels[tensor] - start;
        const void *at = (const void *)(uintptr_t)p->addresses[tensor]; /* NULL: a tensor of zeros without memory */
        p->partial[chunk] = at ? loops->power(p->dtype, p->norm_type, at, start, rest < CHUNK ? rest : CHUNK) : 0;
    }
}

/* Add by halves, so that the error grows only with the logarithm of the length. For p = inf, return the largest value, NaN
 * if there is one. */
static double together(const double *values, int64_t n, int norm_type) {
    if (n == 0) return 0;
    if (n == 1) return values[0];
    double a = together(values, n / 2, norm_type), b = together(values + n / 2, n - n / 2, norm_type);
    if (norm_type != LARGEST_ONE) return a + b;
    return isnan(a) || a > b ? a : b;
}

/* out[i]: the sum of |x|^norm_type of tensor i, or the largest |x| for norm_type 0. Returns 1 if out of memory, else 0. */
EXPORT int meshstep_powers(int64_t tensors, const uint64_t *addresses, const int64_t *numels, int dtype, int norm_type,
                           double *out, int threads) {
    int64_t elements, *first = first_chunks(tensors, numels, &elements);
    if (!first) return 1;
    int64_t chunks = first[tensors];
    double *partial = malloc((size_t)(chunks + 1) * sizeof *partial);
    if (!partial) {
        free(first);
        return 1;
    }
    struct powers powers = {addresses, numels, first, tensors, dtype, norm_type, partial};
    if (chunks) in_parallel(powers_of_chunks, &powers, chunks, elements, threads);
    for (int64_t i = 0; i < tensors; i++) out[i] = together(partial + first[i], first[i + 1] - first[i], norm_type);
    free(first);
    free(partial);
    return 0;
}

struct means {
    const uint64_t *addresses;
    const int64_t *numels, *first_chunk;
    double **out;
    int64_t tensors;
    int dtype, squares;
};

static void means_of_chunks(void *given, int64_t begin, int64_t end) {
    struct means *m = given;
    int64_t tensor = tensor_at(m->first_chunk, m->tensors, begin);
    for (int64_t chunk = begin; chunk < end; chunk++) {
        while (chunk >= m->first_chunk[tensor + 1]) tensor++;
        int64_t start = (chunk - m->first_chunk[tensor]) * CHUNK, rest = m->numels[tensor] - start;
        int64_t count = rest < CHUNK ? rest : CHUNK;
        const void *at = (const void *)(uintptr_t)m->addresses[tensor]; /* NULL: a tensor of zeros without memory */
        double *out = m->out[tensor] + start / EIGHT;
        if (at) loops->means(m->dtype, m->squares, at, start, count, out);
        else memset(out, 0, (size_t)((count + EIGHT - 1) / EIGHT) * sizeof *out);
    }
}

/* out: for each tensor in turn, the mean of |x|^norm_type (1 or 2) per EIGHT elements; the last elements of a tensor are filled
 * up with zeros. Not for float64. Returns 1 if out of memory, else 0. */
EXPORT int meshstep_means(int64_t tensors, const uint64_t *addresses, const int64_t *numels, int dtype, int norm_type,
                          double *out, int threads) {
    int64_t elements, *first = first_chunks(tensors, numels, &elements);
    double **outs = malloc((size_t)(tensors + 1) * sizeof *outs);
    if (!first || !outs) {
        free(first);
        free(outs);
        return 1;
    }
    for (int64_t i = 0; i < tensors; i++) {
        outs[i] = out;
        out += (numels[i] + EIGHT - 1) / EIGHT;
    }
    struct means means = {addresses, numels, first, outs, tensors, dtype, norm_type == 2};
    if (first[tensors]) in_parallel(means_of_chunks, &means, first[tensors], elements, threads);
    free(first);
    free(outs);
    return 0;
}

/* Updates. ----------------------------------------------------------------------------------------------------------- */

struct updates {
    const struct update *update;
    const struct tensor *tensors;
    const int64_t *first_chunk;
    int64_t count;
};

static void update_chunks(void *given, int64_t begin, int64_t end) {
    struct updates *u = given;
    int64_t at = tensor_at(u->first_chunk, u->count, begin);
    for (int64_t chunk = begin, stop; chunk < end; chunk = stop) {
        while (chunk >= u->first_chunk[at + 1]) at++;
        stop = u->first_chunk[at + 1] < end ? u->first_chunk[at + 1] : end;
        int64_t start = (chunk - u->first_chunk[at]) * CHUNK, until = (stop - u->first_chunk[at]) * CHUNK;
        const struct tensor *tensor = &u->tensors[at];
        loops->update(u->update, tensor, start, (until < tensor->numel ? until : tensor->numel) - start);
    }
}

/* Version of the functions' arguments and kinds. Increment it with every change of them; INTERFACE in `native.py` must be equal. */
EXPORT int meshstep_interface(void) { return 7; }

/* One update of `count` tensors; changes nothing if *found_inf is not 0.
 *
 * columns: 5 consecutive arrays of `count` addresses: param, first, second, third state, step; 0: none.
 * grads: `count` addresses. halves: NULL, or `count` addresses of half-precision copies of the params; 0: none.
 * rests: NULL, or `count` addresses of 16-bit remainders of bfloat16 params; 0: none.
 * hyper: Adam: lr, beta1, beta2, eps, weight decay, decoupled, amsgrad. SGD: lr, momentum, dampening, weight decay, nesterov.
 *        Adagrad: lr, lr decay, eps, weight decay. Lion: lr, beta1, beta2, weight decay.
 * factor: multiplies the gradients; negative to maximize. Returns 1 if out of memory, else 0. */
EXPORT int meshstep_update(int kind, int64_t count, const uint64_t *columns, const uint64_t *grads, const uint64_t *halves,
                           const uint64_t *rests, const int64_t *numels, int grad_dtype, int half_dtype,
                           const double *hyper, double factor, const float *found_inf, int threads) {
    if (*found_inf != 0) return 0;
    struct update update = {.kind = kind, .grad_dtype = grad_dtype, .half_dtype = half_dtype};
    if (kind == ADAM)
        update.adam = (struct adam){(float)factor, (float)hyper[1], (float)hyper[2], (float)(1 - hyper[1]), (float)(1 - hyper[2]),
                                    (float)hyper[3], (float)(hyper[5] != 0 ? 1 - hyper[0] * hyper[4] : hyper[4]),
                                    hyper[5] != 0, hyper[6] != 0};
    else if (kind == SGD)
        update.sgd = (struct sgd){(float)factor, (float)hyper[3], (float)hyper[0], (float)hyper[1], (float)(1 - hyper[2]),
                                  hyper[4] != 0};
    else if (kind == LION)
        update.lion = (struct lion){(float)(1 / factor), (float)hyper[1], (float)hyper[2], (float)(1 - hyper[1]),
                                    (float)(1 - hyper[2]), (float)-hyper[0], (float)(1 - hyper[0] * hyper[3])};
    else if (kind == ADAGRAD) update.adagrad = (struct adagrad){(float)factor, (float)hyper[3], (float)hyper[2]};
    struct tensor *tensors = malloc((size_t)(count + 1) * sizeof *tensors);
    int64_t elements, *first = first_chunks(count, numels, &elements);
    if (!tensors || !first) {
        free(tensors);
        free(first);
        return 1;
    }
    update.past_caches = elements >= MANY;
    double counted = -1, size = 0, root = 1;
    for (int64_t i = 0; i < count; i++) {
        struct tensor *tensor = &tensors[i];
        float *at[5];
        for (int column = 0; column < 5; column++) at[column] = (float *)(uintptr_t)columns[column * count + i];
        *tensor = (struct tensor){.param = at[0], .first = at[1], .second = at[2], .third = at[3], .numel = numels[i]};
        tensor->grad = (const void *)(uintptr_t)grads[i];
        if (halves) tensor->half = (void *)(uintptr_t)halves[i];
        if (rests && rests[i]) tensor->rest = (int16_t *)(uintptr_t)rests[i], tensor->half = at[0];
        float *step = at[4];
        if (step) {
            *step += 1;
            if (*step != counted) { /* computing a power is slower than stepping a small tensor */
                counted = *step;
                size = kind == ADAM ? hyper[0] / (1 - pow(hyper[1], counted)) : hyper[0] / (1 + (counted - 1) * hyper[1]);
                root = kind == ADAM ? sqrt(1 - pow(hyper[2], counted)) : 1;
            }
        }
        tensor->by_step[0] = (float)size, tensor->by_step[1] = (float)root;
    }
    struct updates updates = {&update, tensors, first, count};
    if (first[count]) in_parallel(update_chunks, &updates, first[count], elements, threads);
    free(tensors);
    free(first);
    return 0;
}

/* Stochastic rounding. ----------------------------------------------------------------------------------------------- */

struct roundings {
    const uint64_t *targets, *sources, *keys;
    const int64_t *numbers, *numels, *first_chunk;
    int64_t tensors;
    uint64_t step;
};

static void round_chunks(void *given, int64_t begin, int64_t end) {
    struct roundings *r = given;
    int64_t at = tensor_at(r->first_chunk, r->tensors, begin);
    for (int64_t chunk = begin; chunk < end; chunk++) {
        while (chunk >= r->first_chunk[at + 1]) at++;
        int64_t start = (chunk - r->first_chunk[at]) * CHUNK, rest = r->numels[at] - start;
        struct rounding rounding = {(const uint32_t *)(uintptr_t)r->sources[at], (uint16_t *)(uintptr_t)r->targets[at],
                                    r->keys[at], (uint64_t)r->numbers[at], r->step};
        loops->round(&rounding, start, rest < CHUNK ? rest : CHUNK);
    }
}

/* Round float32 `sources` to bfloat16 `targets`, with the noise of `rounding.py`.
 *
 * keys, numbers: for each tensor the key of its noise, and its number among the tensors with this key. Returns 1 if out of
 * memory, else 0. */
EXPORT int meshstep_round(int64_t tensors, const uint64_t *targets, const uint64_t *sources, const int64_t *numels,
                          const uint64_t *keys, const int64_t *numbers, uint64_t step, int threads) {
    int64_t elements, *first = first_chunks(tensors, numels, &elements);
    if (!first) return 1;
    struct roundings roundings = {targets, sources, keys, numbers, numels, first, tensors, step};
    if (first[tensors]) in_parallel(round_chunks, &roundings, first[tensors], elements, threads);
    free(first);
    return 0;
}
