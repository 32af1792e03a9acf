/* The CPU backend, for few rows and, in the indexer, for many: each function walks rows one by one, so a row's bits never depend on how many
 * rows run beside it. Plain C99, float32, contiguous rows; the Python modules beside this file check that.
 * Each function equals the torch lines of cedar/kernels/reference/ under the same name. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_STREAMS 8
#define MAX_KEYS 4096
#define MAX_INDEX_CHANNELS 256

static float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* eight partial sums keep a fixed order and let the compiler vectorise without reordering floats */
static float dot(const float *a, const float *b, int64_t n) {
    float partial[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int lane = 0; lane < 16; lane++) partial[lane] += a[i + lane] * b[i + lane];
    float sum = 0;
    for (; i < n; i++) sum += a[i] * b[i];
    for (int step = 8; step; step /= 2)
        for (int lane = 0; lane < step; lane++) partial[lane] += partial[lane + step];
    return sum + partial[0];
}

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* ---- number formats -------------------------------------------------------------------------------- */

/* smallest power of two not below x, from the bits: next exponent if the mantissa is not zero */
static float ceil_power_of_two(float x) {
    uint32_t bits = float_to_bits(x);
    return bits_to_float((bits + 0x007FFFFFu) & 0x7F800000u);
}

static float round_e4m3(float x) {
    float magnitude = fabsf(x);
    if (magnitude < 0x1p-6f) return copysignf(rintf(magnitude * 512.0f) / 512.0f, x);
    uint32_t bits = float_to_bits(magnitude);
    bits += 0x0007FFFFu + ((bits >> 20) & 1u);
    return copysignf(bits_to_float(bits & 0xFFF00000u), x);
}

static float round_e2m1(float x) {
    float a = fabsf(x);
    float r = a <= 0.25f ? 0.0f : a < 0.75f ? 0.5f : a <= 1.25f ? 1.0f : a < 1.75f ? 1.5f
            : a <= 2.5f ? 2.0f : a < 3.5f ? 3.0f : a <= 5.0f ? 4.0f : 6.0f;
    return copysignf(r, x);
}

static float clamp(float x, float limit) { return fminf(fmaxf(x, -limit), limit); }

static float group_amax(const float *x, int group) {
    float amax = 0;
    for (int i = 0; i < group; i++) amax = fmaxf(amax, fabsf(x[i]));
    return amax;
}

/* kind 0: FP8 (E4M3, power-of-two scale per 32), 1: FP4 main (E2M1, E4M3 scale per 16), 2: FP4 index (E2M1, E8M0 per 32) */
EXPORT void round_rows(const float *x, float *y, int64_t count, int kind) {
    const int group = kind == 1 ? 16 : 32;
    for (int64_t start = 0; start < count; start += group) {
        const float *in = x + start;
        float *out = y + start;
        float amax = group_amax(in, group);
        if (kind == 0) {
            float scale = ceil_power_of_two(fmaxf(amax, 1e-4f) * (1.0f / 448.0f));
            for (int i = 0; i < group; i++) out[i] = round_e4m3(clamp(in[i] / scale, 448.0f)) * scale;
        } else {
            float scale = kind == 1 ? round_e4m3(fminf(fmaxf(amax, 6.0f * 0x1p-9f) / 6.0f, 448.0f))
                                    : ceil_power_of_two(fmaxf(amax, 6.0f * 0x1p-126f) * (1.0f / 6.0f));
            for (int i = 0; i < group; i++) out[i] = round_e2m1(clamp(in[i] / scale, 6.0f)) * scale;
        }
    }
}

/* ---- dense ------------------------------------------------------------------------------------------- */

EXPORT void rms_norm(const float *x, const float *gain, float *y, int64_t rows, int64_t channels, float eps) {
    for (int64_t t = 0; t < rows; t++, x += channels, y += channels) {
        float scale = 1.0f / sqrtf(dot(x, x, channels) / (float)channels + eps);
        for (int64_t c = 0; c < channels; c++) y[c] = x[c] * scale * gain[c];
    }
}

EXPORT void rotate(const float *x, const float *cosines, const float *sines, float *y, int64_t rows, int64_t heads,
                   int64_t channels, int64_t pairs) {
    for (int64_t t = 0; t < rows; t++, cosines += pairs, sines += pairs)
        for (int64_t h = 0; h < heads; h++, x += channels, y += channels) {
            int64_t still = channels - 2 * pairs;
            memcpy(y, x, (size_t)still * sizeof(float));
            for (int64_t p = 0; p < pairs; p++) {
                float even = x[still + 2 * p], odd = x[still + 2 * p + 1];
                y[still + 2 * p] = even * cosines[p] - odd * sines[p];
                y[still + 2 * p + 1] = even * sines[p] + odd * cosines[p];
            }
        }
}

EXPORT void swiglu(const float *gate, const float *up, float *y, int64_t count, float limit) {
    for (int64_t i = 0; i < count; i++) {
        float g = fminf(gate[i], limit);
        y[i] = g * sigmoid(g) * clamp(up[i], limit);
    }
}

/* ---- hyper-connections --------------------------------------------------------------------------------- */

EXPORT void mix_coefficients(const float *streams, const float *fn, const float *scale, const float *base, float *pre,
                             float *post, float *mixing, int64_t rows, int n, int64_t channels, int iterations,
                             float eps, float rms_eps) {
    const int outputs = n * (2 + n);
    const int64_t width = n * channels;
    for (int64_t t = 0; t < rows; t++, streams += width, pre += n, post += n, mixing += n * n) {
        float mixed[MAX_STREAMS * (2 + MAX_STREAMS)];
        float inverse_rms = 1.0f / sqrtf(dot(streams, streams, width) / (float)width + rms_eps);
        for (int o = 0; o < outputs; o++) mixed[o] = dot(fn + o * width, streams, width) * inverse_rms;
        for (int i = 0; i < n; i++) {
            pre[i] = sigmoid(mixed[i] * scale[0] + base[i]) + eps;
            post[i] = 2.0f * sigmoid(mixed[n + i] * scale[1] + base[n + i]);
        }
        for (int i = 0; i < n; i++) {
            float *row = mixing + i * n, peak = -INFINITY, total = 0;
            for (int j = 0; j < n; j++) {
                row[j] = mixed[2 * n + i * n + j] * scale[2] + base[2 * n + i * n + j];
                peak = fmaxf(peak, row[j]);
            }
            for (int j = 0; j < n; j++) total += row[j] = expf(row[j] - peak);
            for (int j = 0; j < n; j++) row[j] = row[j] / total + eps;
        }
        for (int round = 0; round < iterations; round++) {
            for (int i = 0; round && i < n; i++) {
                float total = 0;
                for (int j = 0; j < n; j++) total += mixing[i * n + j];
                for (int j = 0; j < n; j++) mixing[i * n + j] /= total + eps;
            }
            for (int j = 0; j < n; j++) {
                float total = 0;
                for (int i = 0; i < n; i++) total += mixing[i * n + j];
                for (int i = 0; i < n; i++) mixing[i * n + j] /= total + eps;
            }
        }
    }
}

EXPORT void collapse(const float *streams, const float *premix, float *y, int64_t rows, int n, int64_t channels) {
    for (int64_t t = 0; t < rows; t++, streams += n * channels, premix += n, y += channels)
        for (int64_t c = 0; c < channels; c++) {
            float sum = 0;
            for (int i = 0; i < n; i++) sum += premix[i] * streams[i * channels + c];
            y[c] = sum;
        }
}

EXPORT void expand(const float *y, const float *streams, const float *post, const float *mixing, float *out,
                   int64_t rows, int n, int64_t channels) {
    for (int64_t t = 0; t < rows; t++, y += channels, streams += n * channels, post += n, mixing += n * n)
        for (int j = 0; j < n; j++, out += channels)
            for (int64_t c = 0; c < channels; c++) {
                float sum = post[j] * y[c];
                for (int i = 0; i < n; i++) sum += mixing[i * n + j] * streams[i * channels + c];
                out[c] = sum;
            }
}

/* ---- attention ------------------------------------------------------------------------------------------- */

/* returns 0, or 1 if there are more keys than the stack buffer holds */
EXPORT int attention(const float *query, const float *window, const uint8_t *window_visible, const float *entry,
                     const uint8_t *entry_visible, const float *sink, float *out, int64_t rows, int64_t heads,
                     int64_t channels, int64_t num_window, int64_t num_entries) {
    const int64_t keys = num_window + num_entries;
    if (keys > MAX_KEYS) return 1;
    const float scale = 1.0f / sqrtf((float)channels);
    float weight[MAX_KEYS];
    for (int64_t t = 0; t < rows; t++) {
        for (int64_t h = 0; h < heads; h++, query += channels, out += channels) {
            float peak = -1e30f, total = 0;
            for (int64_t k = 0; k < keys; k++) {
                int near = k < num_window;
                if (!(near ? window_visible[k] : entry_visible[k - num_window])) continue;
                const float *key = near ? window + k * channels : entry + (k - num_window) * channels;
                weight[k] = dot(query, key, channels) * scale;
                peak = fmaxf(peak, weight[k]);
            }
            memset(out, 0, (size_t)channels * sizeof(float));
            for (int64_t k = 0; k < keys; k++) {
                int near = k < num_window;
                if (!(near ? window_visible[k] : entry_visible[k - num_window])) continue;
                const float *key = near ? window + k * channels : entry + (k - num_window) * channels;
                float w = expf(weight[k] - peak);
                total += w;
                for (int64_t c = 0; c < channels; c++) out[c] += w * key[c];
            }
            total += expf(sink[h] - peak);
            for (int64_t c = 0; c < channels; c++) out[c] /= total;
        }
        window += num_window * channels;
        window_visible += num_window;
        entry += num_entries * channels;
        entry_visible += num_entries;
    }
    return 0;
}

/* ---- indexer --------------------------------------------------------------------------------------------- */

typedef float lanes __attribute__((vector_size(64)));
typedef int32_t lane_bits __attribute__((vector_size(64)));
#define LANES 16
#define VECTORS 4
#define TILE (LANES * VECTORS)

/* what is not below zero; NaN stays */
static lanes positive(lanes x) { return (lanes)((lane_bits)x & ~(x < (lanes){0})); }

/* a tile of entries side by side, so that an entry's sum has one order however many there are; two heads at once */
EXPORT void index_scores(const float *query, const float *weight, const float *key, float *out, int64_t rows,
                         int64_t heads, int64_t channels, int64_t entries) {
    lanes tile[MAX_INDEX_CHANNELS * VECTORS];
    for (int64_t first = 0; first < entries; first += TILE) {
        const int64_t count = entries - first < TILE ? entries - first : TILE;
        float *flat = (float *)tile;
        if (count < TILE) memset(flat, 0, (size_t)(channels * TILE) * sizeof(float));
        for (int64_t e = 0; e < count; e++)
            for (int64_t i = 0; i < channels; i++) flat[i * TILE + e] = key[(first + e) * channels + i];
        for (int64_t t = 0; t < rows; t++) {
            lanes total[VECTORS] = {{0}};
            const float *q = query + t * heads * channels, *w = weight + t * heads;
            int64_t h = 0;
            for (; h + 2 <= heads; h += 2, q += 2 * channels) {
                lanes a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, b0 = {0}, b1 = {0}, b2 = {0}, b3 = {0};
                for (int64_t i = 0; i < channels; i++) {
                    const lanes *k = tile + i * VECTORS;
                    const float qa = q[i], qb = q[channels + i];
                    a0 += qa * k[0], a1 += qa * k[1], a2 += qa * k[2], a3 += qa * k[3];
                    b0 += qb * k[0], b1 += qb * k[1], b2 += qb * k[2], b3 += qb * k[3];
                }
                total[0] += positive(a0) * w[h], total[1] += positive(a1) * w[h];
                total[2] += positive(a2) * w[h], total[3] += positive(a3) * w[h];
                total[0] += positive(b0) * w[h + 1], total[1] += positive(b1) * w[h + 1];
                total[2] += positive(b2) * w[h + 1], total[3] += positive(b3) * w[h + 1];
            }
            for (; h < heads; h++, q += channels)
                for (int v = 0; v < VECTORS; v++) {
                    lanes a = {0};
                    for (int64_t i = 0; i < channels; i++) a += q[i] * tile[i * VECTORS + v];
                    total[v] += positive(a) * w[h];
                }
            memcpy(out + t * entries + first, total, (size_t)count * sizeof(float));
        }
    }
}

/* the same sums where each row has keys of its own */
EXPORT void gathered_index_scores(const float *query, const float *weight, const float *key, float *out, int64_t rows,
                                  int64_t heads, int64_t channels, int64_t entries) {
    for (int64_t t = 0; t < rows; t++)
        index_scores(query + t * heads * channels, weight + t * heads, key + t * entries * channels, out + t * entries, 1,
                     heads, channels, entries);
}

/* larger floats have larger keys; -0 equals +0 */
static uint32_t float_key(float x) {
    uint32_t bits = float_to_bits(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* the columns of the k largest scores above -inf, ascending; ties go to the lower column, -1 where there are fewer.
   scratch: `entries` keys */
EXPORT void top_entries(const float *score, int64_t *index, uint32_t *scratch, int64_t rows, int64_t entries, int64_t k) {
    static const int shifts[] = {20, 8, 0}, widths[] = {12, 12, 8};
    const uint32_t least = float_key(-INFINITY);
    for (int64_t t = 0; t < rows; t++, score += entries, index += k) {
        int64_t above = 0;
        for (int64_t e = 0; e < entries; e++) {
            scratch[e] = float_key(score[e]);
            above += scratch[e] > least;
        }
        /* the k-th largest key, some bits at a time; 0 takes every finite score */
        uint32_t cut = 0;
        int64_t ties = 0;
        if (above > k) {
            int64_t wanted = k;
            for (int step = 0; step < 3; step++) {
                uint32_t counts[4096] = {0};
                const int shift = shifts[step], width = widths[step];
                const uint32_t mask = (1u << width) - 1, known = step ? ~0u << (shift + width) : 0;
                for (int64_t e = 0; e < entries; e++)
                    if ((scratch[e] & known) == cut) counts[(scratch[e] >> shift) & mask]++;
                uint32_t bucket = mask;
                while (counts[bucket] < wanted) wanted -= counts[bucket--];
                cut |= bucket << shift;
            }
            ties = wanted;
        }
        int64_t taken = 0;
        for (int64_t e = 0; e < entries && taken < k; e++)
            if (scratch[e] > least && (scratch[e] > cut || (scratch[e] == cut && ties-- > 0))) index[taken++] = e;
        while (taken < k) index[taken++] = -1;
    }
}

/* ---- experts ---------------------------------------------------------------------------------------------- */

/* scratch: 2 * inner floats */
/* expert by expert, so that a weight row is read once for all rows that chose it; each row's sums run in the order of
   its ids, which ascend */
EXPORT void experts(const float *u, const int64_t *ids, const float *weights, const float *w1, const float *w3,
                    const float *w2, float *out, float *scratch, int64_t *taken, int64_t rows, int64_t chosen,
                    int64_t channels, int64_t inner, int64_t num_experts, float limit, int round_inner) {
    memset(out, 0, (size_t)(rows * channels) * sizeof(float));
    float *rounded = scratch + rows * chosen * inner;
    for (int64_t e = 0; e < num_experts; e++) {
        int64_t count = 0;
        for (int64_t place = 0; place < rows * chosen; place++)
            if (ids[place] == e) taken[count++] = place;
        if (!count) continue;
        const float *gate = w1 + e * inner * channels, *up = w3 + e * inner * channels;
        for (int64_t i = 0; i < inner; i++, gate += channels, up += channels)
            for (int64_t n = 0; n < count; n++) {
                const float *x = u + taken[n] / chosen * channels;
                float g = fminf(dot(gate, x, channels), limit), v = clamp(dot(up, x, channels), limit);
                scratch[n * inner + i] = g * sigmoid(g) * v * weights[taken[n]];
            }
        const float *middle = scratch;
        if (round_inner) {
            for (int64_t n = 0; n < count; n++) round_rows(scratch + n * inner, rounded + n * inner, inner, 0);
            middle = rounded;
        }
        const float *down = w2 + e * channels * inner;
        for (int64_t c = 0; c < channels; c++, down += inner)
            for (int64_t n = 0; n < count; n++)
                out[taken[n] / chosen * channels + c] += dot(down, middle + n * inner, inner);
    }
}

EXPORT void linear(const float *x, const float *weight, float *y, int64_t rows, int64_t inputs, int64_t outputs) {
    for (int64_t t = 0; t < rows; t++, x += inputs, y += outputs)
        for (int64_t o = 0; o < outputs; o++) y[o] = dot(weight + o * inputs, x, inputs);
}

/* ids ascending; ties go to the lower expert */
EXPORT void route(const float *u, const uint8_t *image, const float *weight, const float *bias, const float *image_bias,
                  int64_t *ids, float *weights, float *scores, int64_t rows, int64_t channels, int64_t num_experts,
                  int64_t chosen, float scaling) {
    for (int64_t t = 0; t < rows; t++, u += channels, ids += chosen, weights += chosen, scores += num_experts) {
        const float *used = image && image[t] ? image_bias : bias;
        for (int64_t e = 0; e < num_experts; e++) {
            float logit = dot(weight + e * channels, u, channels);
            scores[e] = sqrtf(logit > 20.0f ? logit : log1pf(expf(logit)));
        }
        float total = 0;
        int64_t count = 0;
        for (int64_t e = 0; e < num_experts && count < chosen; e++) {
            /* e is chosen if fewer than `chosen` experts come before it */
            int64_t before = 0;
            float value = scores[e] + used[e];
            for (int64_t other = 0; other < num_experts; other++) {
                float rival = scores[other] + used[other];
                before += rival > value || (rival == value && other < e);
            }
            if (before < chosen) ids[count++] = e;
        }
        for (int64_t k = 0; k < chosen; k++) total += weights[k] = scores[ids[k]];
        for (int64_t k = 0; k < chosen; k++) weights[k] = weights[k] / (total + 1e-20f) * scaling;
    }
}
