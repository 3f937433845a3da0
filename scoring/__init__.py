"""What is made of a trained run: fused scores, memory, linear ranker, calibration, exports, prediction."""
