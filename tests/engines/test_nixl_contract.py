"""What every mover promises, held against NIXL: all rules of `test_contract` but the one on `quiesce`, not claimed."""

from __future__ import annotations

import pytest

from engines.test_contract import (
    test_a_fence_leaves_the_grants_of_others_alone,
    test_a_fenced_extent_takes_no_write_of_an_earlier_grant,
    test_a_final_answer_stays,
    test_a_grant_to_one_handle_is_no_grant_to_another,
    test_a_hundred_thousand_descriptors_land_each_in_its_place,
    test_a_large_batch_is_not_copied_by_the_caller,
    test_a_new_grant_of_fenced_memory_works_and_spans_old_and_new,
    test_a_source_outside_registered_memory_is_refused,
    test_a_write_outside_the_grant_is_refused_with_nothing_written,
    test_a_write_to_an_ended_peer_fails_and_is_quiet,
    test_an_ended_peer_cannot_be_connected_to,
    test_bytes_are_visible_once_a_write_is_done,
    test_close_is_final_and_idempotent,
    test_columns_that_are_no_batch_are_refused,
    test_deregistered_memory_is_no_source_any_more,
    test_handles_of_something_else_are_refused,
    test_many_writers_at_once_do_not_disturb_each_other,
    test_memory_is_zeroed_aligned_and_offers_the_buffer_protocol,
    test_memory_of_the_caller_is_a_source_when_registered,
    test_memory_that_is_not_registered_cannot_be_granted,
    test_more_writes_than_the_capability_says_are_refused,
    test_nothing_moves_where_every_length_is_zero,
    test_one_mover_takes_calls_from_many_threads,
    test_only_aligned_extents_of_registered_memory_can_be_granted_or_fenced,
    test_peers_are_known_by_incarnation,
    test_who_is_granted_nothing_can_write_nothing,
    test_zero_lengths_between_others_are_skipped,
)
from support.nixl_fixtures import library, make

__all__ = [
    "library",
    "make",
    "test_a_fence_leaves_the_grants_of_others_alone",
    "test_a_fenced_extent_takes_no_write_of_an_earlier_grant",
    "test_a_final_answer_stays",
    "test_a_grant_to_one_handle_is_no_grant_to_another",
    "test_a_hundred_thousand_descriptors_land_each_in_its_place",
    "test_a_large_batch_is_not_copied_by_the_caller",
    "test_a_new_grant_of_fenced_memory_works_and_spans_old_and_new",
    "test_a_source_outside_registered_memory_is_refused",
    "test_a_write_outside_the_grant_is_refused_with_nothing_written",
    "test_a_write_to_an_ended_peer_fails_and_is_quiet",
    "test_an_ended_peer_cannot_be_connected_to",
    "test_bytes_are_visible_once_a_write_is_done",
    "test_close_is_final_and_idempotent",
    "test_columns_that_are_no_batch_are_refused",
    "test_deregistered_memory_is_no_source_any_more",
    "test_handles_of_something_else_are_refused",
    "test_many_writers_at_once_do_not_disturb_each_other",
    "test_memory_is_zeroed_aligned_and_offers_the_buffer_protocol",
    "test_memory_of_the_caller_is_a_source_when_registered",
    "test_memory_that_is_not_registered_cannot_be_granted",
    "test_more_writes_than_the_capability_says_are_refused",
    "test_nothing_moves_where_every_length_is_zero",
    "test_one_mover_takes_calls_from_many_threads",
    "test_only_aligned_extents_of_registered_memory_can_be_granted_or_fenced",
    "test_peers_are_known_by_incarnation",
    "test_who_is_granted_nothing_can_write_nothing",
    "test_zero_lengths_between_others_are_skipped",
]

pytestmark = pytest.mark.slow
