// Control groups of this process.
#include "cgroups.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

namespace coll {
namespace {

constexpr uint64_t kUnlimited = uint64_t(1) << 60;  // version 1 writes a number near 2**63 for no limit

bool read_file(const std::string& path, std::string* text) {
  FILE* f = fopen(path.c_str(), "re");
  if (!f) return false;
  text->clear();
  char part[4096];
  for (size_t got; (got = fread(part, 1, sizeof part, f)) > 0;) text->append(part, got);
  fclose(f);
  return true;
}

bool read_number(const std::string& path, uint64_t* value) {
  std::string text;
  if (!read_file(path, &text) || text.empty() || text[0] < '0' || text[0] > '9') return false;  // "max": no limit
  *value = strtoull(text.c_str(), nullptr, 10);
  return true;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t start = 0; start < text.size();) {  // no string streams: their symbols are of GCC 9
    size_t end = std::min(text.find(separator, start), text.size());
    if (end > start) parts.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return parts;
}

bool has(const std::string& list, const std::string& name) {
  std::vector<std::string> names = split(list, ',');
  return std::find(names.begin(), names.end(), name) != names.end();
}

// The names on a group's path, without "." and "..": a path that leads out of the process's
// cgroup namespace begins with "/..".
std::vector<std::string> names_on(const std::string& path) {
  std::vector<std::string> names;
  for (const std::string& name : split(path, '/')) {
    if (name == ".") continue;
    if (name != "..") names.push_back(name);
    else if (!names.empty()) names.pop_back();
  }
  return names;
}

struct Mount {
  bool second;
  std::vector<std::string> group;  // that is mounted
  std::string point;
};

// The mounted hierarchies that can limit memory.
std::vector<Mount> read_mounts(const std::string& root) {
  std::vector<Mount> mounts;
  std::string text;
  read_file(root + "/proc/self/mountinfo", &text);
  for (const std::string& line : split(text, '\n')) {
    size_t middle = line.find(" - ");
    if (middle == std::string::npos) continue;
    std::vector<std::string> fields = split(line.substr(0, middle), ' '), behind = split(line.substr(middle + 3), ' ');
    if (fields.size() < 5 || behind.size() < 3) continue;
    bool second = behind[0] == "cgroup2";
    if (second || (behind[0] == "cgroup" && has(behind[2], "memory")))
      mounts.push_back({second, names_on(fields[3]), fields[4]});
  }
  return mounts;
}

uint64_t file_caches(const std::string& folder) {
  bool is_first = access((folder + "/memory.usage_in_bytes").c_str(), F_OK) == 0;
  std::string text, prefix = is_first ? "total_" : "";
  read_file(folder + "/memory.stat", &text);
  uint64_t sum = 0;
  for (const std::string& line : split(text, '\n')) {
    std::vector<std::string> words = split(line, ' ');
    if (words.size() != 2) continue;
    for (const char* name : {"inactive_file", "active_file", "slab_reclaimable"})
      if (words[0] == prefix + name) sum += strtoull(words[1].c_str(), nullptr, 10);
  }
  return sum;
}

}  // namespace

std::vector<std::string> memory_groups(const std::string& root) {
  std::vector<std::string> found;
  std::vector<Mount> mounts = read_mounts(root);
  std::string text;
  read_file(root + "/proc/self/cgroup", &text);
  for (const std::string& line : split(text, '\n')) {
    size_t first = line.find(':'), next = first == std::string::npos ? first : line.find(':', first + 1);
    if (next == std::string::npos) continue;
    std::string controllers = line.substr(first + 1, next - first - 1);
    bool second = line.substr(0, first) == "0" && controllers.empty();
    if (!second && !has(controllers, "memory")) continue;
    std::vector<std::string> names = names_on(line.substr(next + 1));
    for (const Mount& mount : mounts) {
      if (mount.second != second) continue;
      bool inside = names.size() >= mount.group.size() && std::equal(mount.group.begin(), mount.group.end(), names.begin());
      std::vector<std::string> below(names.begin() + static_cast<ptrdiff_t>(inside ? mount.group.size() : names.size()),
                                     names.end());
      for (size_t length = below.size() + 1; length-- > 0;) {
        std::string folder = root + "/" + mount.point;
        for (size_t i = 0; i < length; ++i) folder += "/" + below[i];
        bool there = access((folder + "/.").c_str(), F_OK) == 0;  // a folder; stat()'s symbol in glibc is of 2.33
        if (there && std::find(found.begin(), found.end(), folder) == found.end()) found.push_back(folder);
      }
    }
  }
  return found;
}

uint64_t room_in(const std::vector<std::string>& groups) {
  static const char* const kFiles[][2] = {{"/memory.max", "/memory.current"},
                                          {"/memory.limit_in_bytes", "/memory.usage_in_bytes"}};
  uint64_t room = UINT64_MAX;
  for (const std::string& folder : groups) {
    for (const auto& [limit_name, used_name] : kFiles) {
      uint64_t limit, used = 0;
      if (!read_number(folder + limit_name, &limit) || limit >= kUnlimited) continue;
      read_number(folder + used_name, &used);
      used -= std::min(used, file_caches(folder));
      room = std::min(room, limit > used ? limit - used : 0);
    }
  }
  return room;
}

}  // namespace coll
