// HMAC-SHA-256, and the job's secret.
#include "hmac.h"

#include <string.h>

#include <mutex>
#include <vector>

namespace coll {
namespace {

constexpr size_t kBlock = 64;

uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

class Sha256 {
 public:
  void add(const void* data, size_t nbytes) {
    const uint8_t* p = static_cast<const uint8_t*>(data);
    total_ += nbytes;
    while (nbytes) {
      size_t part = nbytes < kBlock - used_ ? nbytes : kBlock - used_;
      memcpy(block_ + used_, p, part);
      p += part, nbytes -= part, used_ += part;
      if (used_ == kBlock) compress();
    }
  }

  Digest end() {
    uint64_t bits = total_ * 8;
    static const uint8_t kPadding[kBlock] = {0x80};
    add(kPadding, used_ < kBlock - 8 ? kBlock - 8 - used_ : 2 * kBlock - 8 - used_);
    uint8_t length[8];
    for (int i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
    add(length, sizeof length);
    Digest digest;
    for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
  }

 private:
  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t block_[kBlock];
  size_t used_ = 0;
  uint64_t total_ = 0;

  void compress() {
    // The first 32 bits of the fractions of the cube roots of the first 64 primes.
    static const uint32_t kRounds[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
        0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
        0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
        0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
        0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
        0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t w[64];
    for (int i = 0; i < 16; ++i)
      w[i] = static_cast<uint32_t>(block_[4 * i]) << 24 | static_cast<uint32_t>(block_[4 * i + 1]) << 16 |
             static_cast<uint32_t>(block_[4 * i + 2]) << 8 | block_[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
      uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (int i = 0; i < 64; ++i) {
      uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25), choice = (e & f) ^ (~e & g);
      uint32_t t1 = h + s1 + choice + kRounds[i] + w[i];
      uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22), majority = (a & b) ^ (a & c) ^ (b & c);
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + s0 + majority;
    }
    const uint32_t sums[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state_[i] += sums[i];
    used_ = 0;
  }
};

struct Secret {
  std::mutex lock;
  std::vector<uint8_t> bytes;
};

Secret& secret() {
  static auto* held = new Secret;
  return *held;
}

}  // namespace

Digest hmac_sha256(const void* key, size_t key_bytes, const void* data, size_t nbytes) {
  uint8_t inner[kBlock] = {}, outer[kBlock];
  if (key_bytes > kBlock) {
    Sha256 hash;
    hash.add(key, key_bytes);
    Digest digest = hash.end();
    memcpy(inner, digest.data(), digest.size());
  } else if (key_bytes) {
    memcpy(inner, key, key_bytes);
  }
  memcpy(outer, inner, kBlock);
  for (uint8_t& byte : inner) byte ^= 0x36;
  for (uint8_t& byte : outer) byte ^= 0x5c;
  Sha256 first, second;
  first.add(inner, kBlock);
  first.add(data, nbytes);
  Digest digest = first.end();
  second.add(outer, kBlock);
  second.add(digest.data(), digest.size());
  return second.end();
}

bool same_digest(const Digest& a, const Digest& b) {
  uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

void set_job_secret(const void* bytes, size_t nbytes) {
  const uint8_t* first = static_cast<const uint8_t*>(bytes);
  std::lock_guard<std::mutex> hold(secret().lock);
  secret().bytes.assign(first, first + nbytes);
}

Digest job_key(const void* label, size_t nbytes) {
  std::lock_guard<std::mutex> hold(secret().lock);
  return hmac_sha256(secret().bytes.data(), secret().bytes.size(), label, nbytes);
}

}  // namespace coll
