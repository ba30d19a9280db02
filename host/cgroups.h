// Control groups of this process, version 1 and 2: how much more memory they let it have.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

namespace coll {

// The folders of the groups that limit this process's memory: its own, and every group above it.
// `root` is the folder that stands for "/".
std::vector<std::string> memory_groups(const std::string& root);
// The bytes that the group with the least room still lets this process have; UINT64_MAX where no
// group has a limit. File caches do not count as used: the kernel frees them when it needs them.
uint64_t room_in(const std::vector<std::string>& groups);

}  // namespace coll
