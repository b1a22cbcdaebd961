"""How much is tested: what belongs to every change, or everything there is (``scripts/test --all``).

Whole cases that only ``--all`` runs are marked: ``@pytest.mark.long``, or ``long(...)`` among parameters.
A loop inside a test asks ``thorough``.

What it costs: ``--effort`` prints the processor seconds of each room and of the dearest tests, those of the processes
included that tests start and wait for.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_DEAREST = 60  # tests that --effort names

everything = False  # set by conftest.py before any test module is imported


def thorough(usual: T, everything_: T) -> T:
    """The second under ``--all``, else the first."""
    return everything_ if everything else usual


def long(*values: Any) -> Any:
    """Parameters that only ``--all`` runs."""
    return pytest.param(*values, marks=pytest.mark.long)


# How many cases the usual run takes of tests that cost more than they tell, evenly from the first to the last; all of
# them run with ``--all``. They are more of the same: another architecture, another format, another moment of a kill.
# 0: none, because of its cost.
USUAL: dict[str, int] = {
    "bench/test_bench.py::test_a_ring_over_machines_is_started_by_ssh": 0,
    "bench/test_bench.py::test_a_table_then_one_json_document": 0,
    "bench/test_bench.py::test_answers_too_short_to_be_measured_are_refused": 0,
    "bench/test_bench.py::test_ctrl_c_leaves_nobody_behind": 0,
    "bench/test_bench.py::test_json_alone_without_baseline_over_a_slow_link": 0,
    "bench/test_bench.py::test_mlx_lm_says_what_it_cannot_cut": 0,
    "bench/test_bench.py::test_plain_mlx_lm_serves_task_after_task": 0,
    "bench/test_bench_links.py::test_a_table_and_a_document": 0,
    "bench/test_bench_speculation.py::test_replay_on_a_tiny_model": 0,
    "bench/test_compare.py::test_a_tiny_model_beside_mlx_lm_and_peers_that_are_wrong": 0,
    "bench/test_compare.py::test_it_is_told_without_a_reference_too": 0,
    "bench/test_compare.py::test_what_cannot_be_tried_without_a_reference_is_named": 0,
    "bench/test_compare.py::test_without_a_reference_mlx_lm_judges_the_first_layers": 0,
    "bench/test_device_mode.py::test_the_document_compares_with_what_the_device_allows": 0,
    "bench/test_exact.py::test_on_the_reference_blas_no_road_parts": 1,
    "bench/test_exact.py::test_planted_rounding_is_found_where_it_parts": 0,
    "bench/test_server_mode.py::test_the_document_compares_with_the_library": 0,
    "bench/test_serving.py::test_codecs_on_the_links_of_a_tiny_model": 0,
    "bench/test_serving.py::test_kv_formats_of_a_tiny_model": 0,
    "bench/test_serving.py::test_serving_a_tiny_model": 0,
    "chat/test_chat.py::test_a_conversation_longer_than_the_context_goes_on": 0,
    "chat/test_terminal.py::test_ctrl_d_leaves": 0,
    "chat/test_terminal.py::test_lines_of_a_pipe": 0,
    "chat/test_terminal.py::test_sigterm_leaves_the_terminal_as_it_was": 0,
    "cluster/test_copies.py::test_weights_travel_twice": 0,
    "cluster/test_deaths.py::test_a_worker_dies_while_it_loads": 0,
    "cluster/test_deaths.py::test_a_worker_freezes": 0,
    "cluster/test_deaths.py::test_one_of_two_workers_is_killed_and_then_the_other": 0,
    "cluster/test_deaths.py::test_the_coordinator_freezes": 0,
    "cluster/test_deaths.py::test_the_coordinator_is_killed": 0,
    "cluster/test_failing_workers.py::test_a_local_worker_whose_device_fails": 0,
    "cluster/test_failing_workers.py::test_a_local_worker_whose_device_stands_still_is_replaced": 0,
    "cluster/test_failing_workers.py::test_a_worker_elsewhere_whose_device_fails_ends": 0,
    "cluster/test_handshake.py::test_a_second_coordinator_hears_who_is_first": 0,
    "cluster/test_handshake.py::test_a_worker_of_another_stage_hears_only_its_own_pipeline": 0,
    "cluster/test_handshake.py::test_a_worker_that_starts_late": 0,
    "cluster/test_handshake.py::test_other_weights": 0,
    "cluster/test_keys.py::test_a_killed_worker_comes_back_with_its_key": 0,
    "cluster/test_keys.py::test_a_local_worker_before_one_with_a_key": 0,
    "cluster/test_kills.py::test_whatever_is_lost_no_token_changes_and_nothing_stays": 0,
    "cluster/test_kv_lasts.py::test_a_replay_after_a_workers_death_reads_its_kv_back": 0,
    "cluster/test_kv_lasts.py::test_the_next_run_of_the_command_finds_what_the_last_one_kept": 0,
    "cluster/test_kv_lasts.py::test_whoever_is_killed_while_writing_leaves_nothing_wrong_behind": 0,
    "cluster/test_llm_endings.py::test_nothing_is_left_behind": 0,
    "cluster/test_many_coordinators.py::test_many_coordinators": 0,
    "cluster/test_peak_memory.py::test_a_stage_holds_its_own_weights_only": 0,
    "cluster/test_rdma_pipeline.py::test_a_carrier_killed_on_emulated_jaccl_is_a_loss_from_which_the_pipeline_recovers": 0,  # noqa: E501
    "cluster/test_rdma_pipeline.py::test_a_killed_carrier_is_a_loss_from_which_the_pipeline_recovers": 0,
    "cluster/test_rdma_pipeline.py::test_a_killed_worker_takes_its_carriers_along": 0,
    "cluster/test_rdma_pipeline.py::test_auto_goes_on_over_tcp_where_a_dead_carrier_has_used_up_its_device": 0,
    "cluster/test_rdma_pipeline.py::test_auto_takes_tcp_where_rdma_is_not_to_be_had_and_says_why_once": 0,
    "cluster/test_rdma_pipeline.py::test_the_command_line_shows_the_reason_and_answers": 0,
    "cluster/test_rdma_sessions.py::test_a_lost_worker_costs_only_its_own_groups": 0,
    "cluster/test_rdma_sessions.py::test_systems_that_do_not_fit_take_tcp_and_say_why": 0,
    "cluster/test_recut_processes.py::test_eight_streams_under_other_cuts": 0,
    "cluster/test_rejoin.py::test_a_frozen_local_worker_is_replaced_unasked": 0,
    "cluster/test_rejoin.py::test_a_local_worker_is_said_to_be_started_again": 0,
    "cluster/test_rejoin.py::test_sigterm_while_a_worker_is_waited_for": 0,
    "cluster/test_rejoin.py::test_what_to_do_is_said_and_the_answer_goes_on": 0,
    "cluster/test_serve.py::test_a_stream_outlives_a_lost_worker_and_sigterm": 0,
    "cluster/test_serve.py::test_the_chat_and_the_server_share_an_engine": 0,
    "cluster/test_signals.py::test_a_local_worker_is_told_to_end": 0,
    "cluster/test_signals.py::test_a_worker_is_told_to_end": 0,
    "cluster/test_signals.py::test_closing_the_pipe_that_reads_the_answer": 0,
    "cluster/test_signals.py::test_impatient_ctrl_c": 0,
    "cluster/test_signals.py::test_sigterm_after_an_answer_ends_the_chat": 0,
    "cluster/test_signals.py::test_sigterm_cuts_a_long_answer_and_keeps_its_text": 0,
    "cluster/test_signals.py::test_sigterm_lets_a_short_answer_end": 0,
    "cluster/test_signals.py::test_the_coordinator_is_told_to_end": 1,
    "cluster/test_signals.py::test_the_second_signal_does_not_wait": 0,
    "cluster/test_strangers.py::test_a_worker_that_listens_to_itself": 0,
    "cluster/test_strangers.py::test_an_order_that_cannot_be_carried_out": 2,
    "cluster/test_strangers.py::test_connections_that_are_reset": 0,
    "cluster/test_strangers.py::test_two_hundred_connections_and_two_hundred_links_that_say_nothing": 0,
    "core/scheduler/test_pipeline_sim.py::test_in_saturation_all_stages_are_busy": 1,
    "core/scheduler/test_policy.py::test_the_objective_is_kept_and_used_up": 1,
    "core/speculation/test_flight.py::test_it_is_what_dice_give": 4,
    "core/speculation/test_several.py::test_everybody_gets_the_tokens_it_gets_alone": 0,
    "engine/coordinator/test_failing_devices.py::test_a_request_that_does_not_fit_alone_ends_alone": 1,
    "engine/coordinator/test_failing_devices.py::test_the_coordinators_device_fails_once": 1,
    "engine/coordinator/test_failing_devices.py::test_without_memory_fewer_run_at_a_time": 0,
    "engine/coordinator/test_llm.py::test_penalties_of_the_answer_are_felt": 1,
    "engine/coordinator/test_llm.py::test_repetition_penalty_is_felt": 0,
    "engine/coordinator/test_llm.py::test_the_name_of_a_local_worker_is_enough": 0,
    "engine/coordinator/test_metrics.py::test_a_real_pipeline": 1,
    "engine/coordinator/test_recut.py::test_no_token_changes": 1,
    "engine/coordinator/test_recut_in_trouble.py::test_what_fails_in_the_middle_leaves_the_cut_before": 1,
    "engine/drafts/test_beside_mlx_vlm.py::test_drafts": 1,
    "engine/drafts/test_dflash.py::test_drafts_are_those_of_a_plain_computation": 1,
    "engine/drafts/test_dflash.py::test_tokens_are_those_without_drafts": 0,
    "engine/drafts/test_drafts.py::test_a_session_of_threads": 1,
    "engine/drafts/test_drafts.py::test_aborted_in_the_middle_of_a_block": 1,
    "engine/drafts/test_drafts.py::test_among_others_that_come_and_go": 0,
    "engine/drafts/test_drafts.py::test_any_prompt_any_flight": 1,
    "engine/drafts/test_drafts.py::test_architectures": 1,
    "engine/drafts/test_drafts.py::test_every_drafter_and_every_flight": 1,
    "engine/drafts/test_drafts.py::test_more_groups_than_stages": 0,
    "engine/drafts/test_drafts.py::test_replay_is_as_wrong_as_it_is_told": 0,
    "engine/drafts/test_drafts.py::test_short_memory_takes_turns": 0,
    "engine/drafts/test_drafts.py::test_states_are_put_back": 1,
    "engine/drafts/test_drafts.py::test_stop_strings_inside_a_block": 0,
    "engine/drafts/test_drafts.py::test_the_demo_pair": 0,
    "engine/drafts/test_drafts.py::test_where_steps_are_launched_ahead": 0,
    "engine/drafts/test_eagle3.py::test_drafts_are_those_of_a_plain_computation": 1,
    "engine/drafts/test_eagle3.py::test_tokens_are_those_without_drafts": 0,
    "engine/drafts/test_every_kind.py::test_kv_on_disk_has_the_drafters_own": 1,
    "engine/drafts/test_every_kind.py::test_n_grams_beside_drafts_that_are_always_wrong": 1,
    "engine/drafts/test_every_kind.py::test_right_and_wrong_drafts_another_cut_a_loss_and_the_same_prompt": 1,
    "engine/drafts/test_heads.py::test_another_cut_and_the_same_prompt_again": 0,
    "engine/drafts/test_heads.py::test_drafts_are_the_heads_own": 1,
    "engine/drafts/test_heads.py::test_tokens_are_those_without_drafts": 0,
    "engine/files/test_pipeline_copies.py::test_a_drafter_is_copied_as_far_as_a_stage_reads_it": 0,
    "engine/links/test_link_probe.py::test_every_exchange_takes_what_its_wire_takes": 1,
    "engine/links/test_wire_codecs.py::test_a_conversation_begins_with_its_prompts_not_with_its_answers": 0,
    "engine/links/test_wire_codecs.py::test_among_others_with_short_memory": 0,
    "engine/links/test_wire_codecs.py::test_prompts_are_packed_and_nothing_else": 1,
    "engine/links/test_wire_codecs.py::test_something_is_rounded_and_fewer_bytes_are_sent": 1,
    "engine/links/test_wire_codecs.py::test_with_drafts": 1,
    "engine/profiling/test_measured_machine.py::test_kernels_that_the_first_step_compiles_do_not_count": 0,
    "engine/profiling/test_measured_machine.py::test_little_time_leaves_large_steps_to_lines": 0,
    "engine/profiling/test_measured_machine.py::test_the_costs_of_an_emulated_accelerator_come_out": 0,
    "engine/stage/test_kv_format.py::test_among_others_under_every_policy": 0,
    "engine/stage/test_kv_format.py::test_every_road_gives_the_same": 0,
    "engine/stage/test_kv_format.py::test_half_precision_keeps_its_dtype": 1,
    "engine/stage/test_kv_format.py::test_kept_in_memory_and_on_disk": 1,
    "engine/stage/test_kv_format.py::test_the_demo_model_takes_less_memory": 0,
    "engine/stage/test_kv_format.py::test_windows_and_states_stay_as_they_are": 0,
    "engine/stage/test_kv_format.py::test_with_drafts": 1,
    "engine/stage/test_on_disk.py::test_a_stage_that_evicts_on_its_own_costs_time_and_no_token": 0,
    "engine/stage/test_on_disk.py::test_after_all_were_restarted_the_next_turn_gets_the_tokens_it_gets_cold": 1,
    "engine/stage/test_on_disk.py::test_other_chunks_after_a_restart_change_no_token": 1,
    "engine/stage/test_on_disk.py::test_other_models_and_dtypes_on_one_folder_do_not_meet": 0,
    "engine/stage/test_on_disk.py::test_short_of_memory_the_rest_comes_from_disk": 1,
    "engine/stage/test_prepared.py::test_most_steps_are_prepared": 1,
    "engine/stage/test_prepared.py::test_preparing_changes_no_bit": 1,
    "engine/stage/test_reuse.py::test_a_second_turn_gets_the_tokens_it_gets_cold": 1,
    "engine/stage/test_reuse.py::test_many_with_one_system_prompt_compute_it_once": 1,
    "engine/stage/test_reuse.py::test_short_of_memory_the_tokens_stay_right": 0,
    "engine/stage/test_swap.py::test_what_is_given_up_is_read_again": 0,
    "engine/test_grammars.py::test_a_draft_model_draws_under_the_mask": 1,
    "engine/test_grammars.py::test_every_road_gives_the_same_tokens": 1,
    "engine/test_long_contexts.py::test_two_turns_are_mlx_lms": 1,
    "engine/test_mixed.py::test_each_gets_the_tokens_it_gets_alone": 1,
    "engine/test_mixed.py::test_launching_ahead_changes_no_token": 0,
    "engine/test_mixed.py::test_other_architectures_are_exact_at_equal_chunking": 0,
    "engine/test_mixed.py::test_other_architectures_part_only_at_near_ties": 0,
    "engine/test_mixed.py::test_who_gives_up_its_kv_gets_the_same_tokens": 0,
    "engine/test_on_accelerator.py::test_drafts": 1,
    "engine/test_on_accelerator.py::test_windows_and_states": 1,
    "engine/test_prompt_scores.py::test_every_road_scores_a_prompt_alike": 1,
    "engine/test_same_tokens.py::test_demo_model": 0,
    "engine/test_same_tokens.py::test_greedy_is_mlx_lm": 2,
    "engine/test_same_tokens.py::test_half_precision_crosses_the_link_exactly": 0,
    "engine/test_same_tokens.py::test_quantised": 1,
    "engine/test_same_tokens.py::test_sampling_takes_every_road_alike": 1,
    "grammar/test_calls.py::test_an_answer_is_calls_or_has_its_form": 3,
    "llm/test_async_request.py::test_many_at_once": 0,
    "llm/test_context.py::test_more_than_what_must_fit_crosses_to_the_workers": 0,
    "matrix/test_loaded.py::test_loaded_stages_answer_like_mlx_lm": 1,
    "matrix/test_matrix.py::test_cuts": 5,
    "matrix/test_over_rdma.py::test_split_over_emulated_jaccl_is_whole": 0,
    "matrix/test_over_rdma.py::test_split_over_rdma_is_whole": 0,
    "matrix/test_vlm.py::test_cuts": 3,
    "matrix/test_vlm.py::test_loaded_stages_answer_like_mlx_vlm": 2,
    "models/test_caches.py::test_attention_is_that_of_a_window_over_everything": 4,
    "models/test_demo.py::test_it_knows_a_tale_when_it_reads_one": 0,
    "models/test_launching_ahead.py::test_a_long_sequence_is_not_copied": 0,
    "models/test_layer_kinds.py::test_kinds_and_bytes": 4,
    "models/test_loader.py::test_a_few_tokens_tell_the_need_of_many": 0,
    "models/test_mlx_lm.py::test_modules_are_the_packages_own_whichever_comes_first": 1,
    "models/test_rounding.py::test_one_row_of_one_layer_that_is_always_wrong_is_seen": 1,
    "models/test_rounding.py::test_rounding_passes": 3,
    "models/test_step.py::test_cohorts_over_many_lengths": 1,
    "models/test_tables.py::test_only_the_larger_of_two_engrams_is_on_disk": 0,
    "models/test_trials.py::test_mistakes_in_blocks_are_refused": 1,
    "models/test_trials.py::test_mistakes_in_rows_are_refused": 1,
    "models/test_trials.py::test_padding_that_is_not_masked_is_refused": 1,
    "models/test_trials.py::test_rounding_is_no_reason_to_refuse": 0,
    "pictures/test_same_tokens_seeing.py::test_a_picture_that_comes_again_is_not_computed_again": 1,
    "pictures/test_same_tokens_seeing.py::test_a_restart_finds_it_on_disk": 1,
    "pictures/test_same_tokens_seeing.py::test_beside_others_with_and_without_pictures": 1,
    "pictures/test_same_tokens_seeing.py::test_drafts_name_no_row_of_a_picture": 1,
    "pictures/test_same_tokens_seeing.py::test_it_answers_as_mlx_vlm": 2,
    "pictures/test_same_tokens_seeing.py::test_who_gives_up_its_kv_sees_on": 0,
    "pictures/test_same_tokens_seeing.py::test_who_loses_a_worker_sees_on": 1,
    "placement/test_plan_choices.py::test_the_plan_is_the_best_of_all_cuts": 1,
    "placement/test_plan_command.py::test_the_machines_that_the_book_describes_can_be_planned_for": 0,
    "probes/test_doctor.py::test_a_frozen_worker_is_not_waited_for_long": 0,
    "probes/test_doctor.py::test_a_worker_that_cannot_reach_the_next": 0,
    "probes/test_doctor.py::test_links_over_rdma_and_what_takes_its_place": 0,
    "probes/test_doctor.py::test_links_with_keys": 0,
    "server/openai/test_drafts_of_answers.py::test_each_answer_has_its_own_drafts": 0,
    "server/page/test_page_recut.py::test_a_page_that_looks_goes_on": 0,
    "server/page/test_staged.py::test_the_words_are_of_what_was_staged_and_the_numbers_of_the_trace": 5,
    "server/test_api_keys.py::test_a_damaged_file_admits_nobody_and_is_not_overwritten": 3,
    "server/test_api_keys.py::test_a_key_that_is_changed_under_a_stream": 0,
    "server/test_attacks.py::test_what_costs_too_much_is_refused_in_a_sentence": 6,
    "server/test_campaigns.py::test_a_storm_changes_no_token_and_leaves_nothing": 0,
    "server/test_campaigns.py::test_streams_beyond_those_that_decode_wait_in_order": 0,
    "server/test_conformance.py::test_chats": 4,
    "server/test_conformance.py::test_responses": 4,
    "sim/test_device_clock.py::test_cuts_by_the_costs_of_each_layer": 0,
    "sim/test_device_clock.py::test_the_search_for_capacity_knows_such_devices": 0,
    "sim/test_search.py::test_stall_free_serves_more_than_prefill_first_where_answers_must_flow": 0,
    "sim/test_search.py::test_the_command": 0,
    "sim/test_simulator.py::test_drafts_give_what_the_sum_over_verdicts_says": 0,
    "transports/test_contract.py::test_contract": 30,
    "transports/test_emulated.py::test_contract_with_both_ends_emulated": 8,
    "transports/test_emulated.py::test_contract_with_one_end_emulated_both_ways": 15,
    "transports/test_link_kills.py::test_kills_at_random_moments": 0,
    "transports/test_peers.py::test_a_frame_over_the_receivers_bounds_ends_the_link": 4,
    "transports/test_peers.py::test_a_frozen_peer_is_noticed_by_its_silence": 3,
    "transports/test_peers.py::test_a_full_queue_waits_and_then_ends_the_link": 3,
    "transports/test_peers.py::test_a_killed_peer_is_noticed_at_once": 4,
    "transports/test_peers.py::test_abort_frees_a_sender_that_waits": 3,
}


def left_to_all(items: Sequence[pytest.Item], folder: Path) -> set[pytest.Item]:
    """The cases beyond those that the usual run takes.

    Raises:
        UsageError: a name in ``USUAL`` is not a test of a file that was collected whole.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("long") is None:
            cases.setdefault(f"{item.path.relative_to(folder)}::{item.name.partition('[')[0]}", []).append(item)
    files, left = {name.partition("::")[0] for name in cases}, set[pytest.Item]()
    every = {f"{item.path.relative_to(folder)}::{item.name.partition('[')[0]}" for item in items}
    if gone := [name for name in USUAL if name.partition("::")[0] in files and name not in every]:
        raise pytest.UsageError(f"tests/effort.py names tests that do not exist: {', '.join(gone)}")
    for name, most in USUAL.items():
        found = cases.get(name, [])
        taken = {found[i * len(found) // most] for i in range(most)} if found else set()
        left |= set(found) - taken
    return left


class ProcessorSeconds:
    """A plugin that adds up what the tests of each room take, on all processes of pytest-xdist."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._rooms: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()  # all cases of a test together
        self._before = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._before = sum(os.times()[:4])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when == "teardown":
            report.user_properties.append(("processor seconds", sum(os.times()[:4]) - self._before))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = dict(report.user_properties).get("processor seconds", 0.0)
        if report.when == "teardown":
            test = report.nodeid.removeprefix("tests/").partition("[")[0]
            self._tests[test] += float(str(seconds))
            self._rooms[test.partition("::")[0].rpartition("/")[0].partition("/")[0]] += float(str(seconds))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._is_shown:
            terminalreporter.section("processor seconds of each room")
            for room, seconds in self._rooms.most_common():
                terminalreporter.line(f"{seconds:8.1f}  {room or 'tests'}")
            terminalreporter.line(f"{sum(self._rooms.values()):8.1f}  together")
            terminalreporter.section("... of the dearest tests")
            for test, seconds in self._tests.most_common(_DEAREST):
                terminalreporter.line(f"{seconds:8.1f}  {test}")
