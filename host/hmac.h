// HMAC-SHA-256 (RFC 2104, FIPS 180-4), and the job's secret, by which processes prove who they are.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <array>
#include <string>

namespace coll {

using Digest = std::array<uint8_t, 32>;

Digest hmac_sha256(const void* key, size_t key_bytes, const void* data, size_t nbytes);
// Compares in the same time wherever they differ.
bool same_digest(const Digest& a, const Digest& b);

// The job's secret; none at first, and none where nbytes is 0.
void set_job_secret(const void* secret, size_t nbytes);
// A key made of the job's secret, where there is one, and of `label`.
Digest job_key(const void* label, size_t nbytes);

}  // namespace coll
