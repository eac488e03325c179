#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace nvme_offload {

/// Whether this build has checksums.
bool has_checksum() noexcept;

/// The contribution of a block to the checksum of its request. The contributions are added, so
/// blocks may complete in any order.
///
/// Each piece between multiples of 4096 in the file is hashed (XXH3, 64 bits) and multiplied by an
/// odd number that encodes its position in the request. Blocks start and end at such multiples or
/// at the ends of the request, so the result does not depend on the block size.
/// *begin*: bytes into the request; *offset*: of the request in the file.
std::uint64_t checksum_block(const std::byte* data, std::uint64_t nbytes, std::uint64_t begin,
                             std::uint64_t offset) noexcept;

/// A hash of 128 bits (XXH3) that detects a change of some memory; nothing where this build has no
/// checksums.
std::optional<std::pair<std::uint64_t, std::uint64_t>> fingerprint(const std::byte* data,
                                                                   std::size_t nbytes) noexcept;

}  // namespace nvme_offload
