#include "backend_fault.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace nvme_offload {
namespace {

class FaultBackend final : public Backend {
 public:
  FaultBackend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultScript> script)
      : inner_(std::move(inner)), script_(std::move(script)), plans_(inner_->depth()) {}

  [[nodiscard]] std::uint32_t depth() const noexcept override { return inner_->depth(); }

  std::size_t submit(const Transfer* const* transfers, std::size_t count, int& error) override {
    std::size_t accepted = 0;
    for (; accepted < count; ++accepted) {
      const Transfer& transfer = *transfers[accepted];
      Plan& plan = plans_[transfer.slot];
      plan = Plan{find(script_->transfers.fetch_add(1)), transfer, transfer.nbytes};
      const Fault* fault = plan.fault;
      if (fault != nullptr && fault->kind == Fault::Kind::refuse) {
        error = static_cast<int>(fault->value);
        return accepted;
      }
      if (fault != nullptr && fault->kind == Fault::Kind::fail) {
        synthetic_.push_back({transfer.slot, -static_cast<std::int64_t>(fault->value)});
        continue;
      }
      if (plan.is_cut() && transfer.operation == Operation::write) {
        // Reports no byte that was not moved, except odd ones behind the last whole sector: a
        // direct write restarts there.
        const File& file = **transfer.file;
        const std::uint64_t granule =
            transfer.descriptor == file.descriptor() ? file.offset_alignment() : 1;
        plan.transfer.nbytes = fault->value / granule * granule;
        if (plan.transfer.nbytes == 0) {
          synthetic_.push_back({transfer.slot, static_cast<std::int64_t>(fault->value)});
          continue;
        }
      }
      const Transfer* one = &plan.transfer;
      if (inner_->submit(&one, 1, error) != 1) return accepted;
      in_flight_ += 1;
    }
    return accepted;
  }

  int reap(std::vector<Completion>& completions, bool wait) override {
    arrived_.clear();
    const bool something = !synthetic_.empty() || (in_flight_ == 0 && !delayed_.empty());
    const int error = inner_->reap(arrived_, wait && !something);
    in_flight_ -= arrived_.size();
    for (Completion& completion : arrived_) {
      const Plan& plan = plans_[completion.slot];
      if (plan.is_cut() && completion.result >= static_cast<std::int64_t>(plan.transfer.nbytes)) {
        if (plan.transfer.operation == Operation::read) {
          std::memset(plan.transfer.data + plan.fault->value, 0xA5,
                      plan.transfer.nbytes - plan.fault->value);
        }
        completion.result = static_cast<std::int64_t>(plan.fault->value);
      }
      if (plan.fault != nullptr && plan.fault->kind == Fault::Kind::delay) {
        delayed_.push_back({completion, plan.fault->value});
        continue;
      }
      completions.push_back(completion);
    }
    completions.insert(completions.end(), synthetic_.begin(), synthetic_.end());
    synthetic_.clear();
    release_delayed(completions);
    return error;
  }

 private:
  struct Plan {
    const Fault* fault = nullptr;
    Transfer transfer;  // as given to the inner backend
    std::size_t asked = 0;

    [[nodiscard]] bool is_cut() const noexcept {
      return fault != nullptr && fault->kind == Fault::Kind::cut && fault->value < asked;
    }
  };
  struct Delayed {
    Completion completion;
    std::uint64_t others;  // completions that must arrive before it
  };

  [[nodiscard]] const Fault* find(std::uint64_t number) const {
    for (const Fault& fault : script_->faults) {
      if (number >= fault.transfer && number - fault.transfer < fault.count) return &fault;
    }
    return nullptr;
  }

  void release_delayed(std::vector<Completion>& completions) {
    const std::size_t others = completions.size();
    std::vector<Delayed> kept;
    for (Delayed& delayed : delayed_) {
      delayed.others -= std::min<std::uint64_t>(delayed.others, others);
      if (delayed.others == 0 || (in_flight_ == 0 && others == 0)) {
        completions.push_back(delayed.completion);
      } else {
        kept.push_back(delayed);
      }
    }
    delayed_ = std::move(kept);
  }

  std::unique_ptr<Backend> inner_;
  std::shared_ptr<FaultScript> script_;
  std::vector<Plan> plans_;            // by slot
  std::vector<Completion> synthetic_;  // of transfers that were not carried out
  std::vector<Delayed> delayed_;
  std::vector<Completion> arrived_;
  std::size_t in_flight_ = 0;  // transfers in the inner backend
};

}  // namespace

std::unique_ptr<Backend> make_fault_backend(std::unique_ptr<Backend> inner,
                                            std::shared_ptr<FaultScript> script) {
  return std::make_unique<FaultBackend>(std::move(inner), std::move(script));
}

}  // namespace nvme_offload
