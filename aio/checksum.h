#pragma once

#include <cstddef>
#include <cstdint>

namespace nvme_offload {

/// Whether this build has checksums at all.
bool has_checksum() noexcept;

/// The part that a block has in the checksum of its request, which is the sum of its blocks' parts in whatever order they come.
///
/// Each piece between multiples of 4096 in the file is hashed (XXH3, 64 bits) and multiplied by an odd number that says its place in the
/// request; blocks begin and end at such multiples or at the request's own ends, so it does not matter how the request was cut.
/// *begin*: bytes into the request; *offset*: the request's in the file.
std::uint64_t checksum_block(const std::byte* data, std::uint64_t nbytes, std::uint64_t begin, std::uint64_t offset) noexcept;

}  // namespace nvme_offload
