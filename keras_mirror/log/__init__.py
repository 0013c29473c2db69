"""What RankZeroLogger is made of: measuring, records, the files they go to, and what is drawn on a console."""
