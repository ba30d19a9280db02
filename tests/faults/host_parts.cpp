// Parts of the host engine that no exported function shows, as a program:
//   room ROOT            the bytes that the control groups under ROOT leave
//   hmac KEY TEXT        HMAC-SHA-256 of hexadecimal bytes, "-" for none
//   key SECRET LABEL     a key of the job's secret
#include <stdio.h>
#include <string.h>

#include <string>

#include "cgroups.h"
#include "hmac.h"

static std::string bytes_of(const char* hex) {
  std::string bytes;
  unsigned byte;
  for (; strlen(hex) >= 2 && sscanf(hex, "%2x", &byte) == 1; hex += 2) bytes += static_cast<char>(byte);
  return bytes;
}

static void print(const coll::Digest& digest) {
  for (uint8_t byte : digest) printf("%02x", byte);
  printf("\n");
}

int main(int argc, char** argv) {
  std::string what = argc > 1 ? argv[1] : "";
  if (what == "room" && argc == 3) {
    printf("%llu\n", static_cast<unsigned long long>(coll::room_in(coll::memory_groups(argv[2]))));
    return 0;
  }
  if (argc != 4) return 2;
  std::string key = bytes_of(argv[2]), text = bytes_of(argv[3]);
  if (what == "hmac") {
    print(coll::hmac_sha256(key.data(), key.size(), text.data(), text.size()));
  } else {
    coll::set_job_secret(key.data(), key.size());
    print(coll::job_key(text.data(), text.size()));
  }
  return 0;
}
