// Parts of the host engine that no exported function shows, as a program. It reads lines of three
// words and prints a line for each:
//   room ROOT -          the bytes that the control groups under ROOT leave
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

int main() {
  char what[16], first[4096], second[4096];
  while (scanf("%15s %4095s %4095s", what, first, second) == 3) {
    if (!strcmp(what, "room")) {
      printf("%llu\n", static_cast<unsigned long long>(coll::room_in(coll::memory_groups(first))));
      continue;
    }
    std::string key = bytes_of(first), text = bytes_of(second);
    if (!strcmp(what, "key")) {
      coll::set_job_secret(key.data(), key.size());
      print(coll::job_key(text.data(), text.size()));
    } else {
      print(coll::hmac_sha256(key.data(), key.size(), text.data(), text.size()));
    }
  }
  return 0;
}
